"""Training scripts to start from; ``train_gpt`` is the one that ``ftckpt demo`` runs."""
