"""The starter model: a small causal language model with its tokenizer, as package data (``tests/starter_model/make.py``
made it), and what a devnet trains it on."""
