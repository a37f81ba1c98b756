"""Maps text to ids and back: SentencePiece models, bytes and Hugging Face's tokenizers."""
