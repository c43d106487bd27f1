"""Text from a decoder: the command, batches of prompts, sampling, decoding of tokens."""
