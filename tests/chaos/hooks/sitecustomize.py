"""Imported by every Python process of a chaos job at its start: lets orders be carried out inside it. Elsewhere it does nothing."""

import os

if os.environ.get("FTCKPT_CHAOS_HOOKS"):
    import inside

    inside.install(os.environ["FTCKPT_CHAOS_HOOKS"])
