"""The quickstart's model and data, made from nothing: task, tokenizer, warm-up, folder."""
