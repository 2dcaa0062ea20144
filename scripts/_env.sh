# Sourced by the scripts beside it: makes .venv once and again only when what it depends on has changed. Runs nothing itself.
# shellcheck shell=bash

ROOT="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
VENV="$ROOT/.venv"

say() { printf '\033[2m[ftckpt]\033[0m %s\n' "$*" >&2; }

die() {
    printf '[ftckpt] %s\n' "$*" >&2
    exit 1
}

is_root() { [ "$(id -u)" = 0 ]; }

# apt_install PACKAGE…: from the distribution, quietly, without starting any service that comes with it.
apt_install() {
    local policy=/usr/sbin/policy-rc.d made=0 rc=0
    if [ ! -e "$policy" ]; then
        printf '#!/bin/sh\nexit 101\n' >"$policy" && chmod +x "$policy" && made=1
    fi
    {
        DEBIAN_FRONTEND=noninteractive apt-get update -qq &&
            DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends "$@"
    } </dev/null >"$VENV.apt.log" 2>&1 || rc=$?
    if [ "$made" = 1 ]; then rm -f "$policy"; fi
    if [ "$rc" != 0 ]; then tail -n 20 "$VENV.apt.log" >&2; fi
    rm -f "$VENV.apt.log"
    return "$rc"
}

# find_python: the first interpreter that runs and is new enough; $PYTHON wins.
find_python() {
    local one
    for one in "${PYTHON:-}" python3 python3.11 python3.12 python3.13 python3.14; do
        if [ -n "$one" ] && "$one" -c 'import sys; sys.exit(sys.version_info < (3, 11))' </dev/null >/dev/null 2>&1; then
            command -v "$one"
            return 0
        fi
    done
    die "Python 3.11 or newer is needed and was not found; install it, or set PYTHON=/path/to/python3"
}

_make_venv() {
    local python
    python="$(find_python)"
    if ! "$python" -c 'import ensurepip, venv' >/dev/null 2>&1; then
        local package
        package="$("$python" -c 'import sys; print("python%d.%d-venv" % sys.version_info[:2])')"
        if is_root && command -v apt-get >/dev/null; then
            say "installing $package"
            apt_install "$package" || die "could not install $package, which $python needs to make a virtual environment"
        else
            die "$python cannot make virtual environments; install $package"
        fi
    fi
    say "making .venv with $python"
    rm -rf "$VENV"
    "$python" -m venv "$VENV"
}

# ftckpt_env EXTRA [WIDER…]: .venv holds the project with EXTRA, at the versions of constraints.txt; first in PATH.
# A stamp per extra keeps the hash of what it was made from, so that a second run costs nothing; the stamp of a WIDER extra will do.
ftckpt_env() {
    local extra="$1" want one
    cd "$ROOT"
    unset PYTHONHOME PYTHONPATH
    exec 9>"$ROOT/.venv.lock"
    if command -v flock >/dev/null; then flock -w 1800 9 || die "another run has held .venv.lock for half an hour"; fi
    "$VENV/bin/python" -c 'import pip' </dev/null >/dev/null 2>&1 || _make_venv
    want="$({ cat pyproject.toml constraints.txt && "$VENV/bin/python" -VV && echo "$ROOT"; } | sha256sum | cut -d' ' -f1)"
    for one in "$@"; do
        if [ "$(cat "$VENV/.ftckpt-$one" 2>/dev/null)" = "$want" ]; then
            extra=""
        fi
    done
    if [ -n "$extra" ]; then
        say "installing ftckpt[$extra] into .venv (minutes the first time)"
        "$VENV/bin/python" -m pip install -qq --no-input --disable-pip-version-check --root-user-action=ignore \
            --constraint constraints.txt --editable ".[$extra]" </dev/null
        printf '%s\n' "$want" >"$VENV/.ftckpt-$extra"
    fi
    exec 9>&-
    export VIRTUAL_ENV="$VENV" PATH="$VENV/bin:$PATH"
}

# etcd_server: an etcd to start in tests; from the distribution where it is missing and we may install it.
etcd_server() {
    if command -v etcd >/dev/null; then return 0; fi
    if is_root && command -v apt-get >/dev/null; then
        say "installing etcd-server"
        apt_install etcd-server || apt_install etcd || die "could not install etcd-server; install it by hand"
        # Tests start their own on free ports; the packaged service is of no use to them.
        if command -v systemctl >/dev/null; then systemctl disable --now etcd >/dev/null 2>&1 || true; fi
        command -v etcd >/dev/null || die "the distribution's etcd package brought no etcd"
    else
        die "the tests start a real etcd and there is none: install it (Debian, Ubuntu: apt-get install etcd-server; Fedora: dnf install etcd; macOS: brew install etcd)"
    fi
}
