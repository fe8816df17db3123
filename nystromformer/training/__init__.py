"""What all training jobs share, on Hugging Face's Trainer."""
