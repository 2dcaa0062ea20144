"""``ftckpt demo``: real replica groups, killed for real, brought back; shows and then judges what happened."""
