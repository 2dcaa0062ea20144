"""Settings from arguments, environment and file; the only reader of the environment and of TOML."""

from ftckpt.config.launcher import Launch, child_environment, launch
from ftckpt.config.settings import Settings, env_name, setting_keys
from ftckpt.config.sources import load, reading, unknown_variables

__all__ = ["Launch", "Settings", "child_environment", "env_name", "launch", "load", "reading", "setting_keys", "unknown_variables"]
