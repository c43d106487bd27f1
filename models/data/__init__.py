"""Data of the training commands: texts, conversations, images, captions, and their batches."""
