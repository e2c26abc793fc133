"""The starter model: a small causal language model with its tokenizer, as package data, and the script that made it."""
