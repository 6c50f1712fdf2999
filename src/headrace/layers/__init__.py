"""Building blocks of models: functions of tensors whose weights load from, and read back as, Hugging Face tensors."""
