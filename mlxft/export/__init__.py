"""From a trained adapter to what other programs load: PEFT's layout, a merged model, GGUF."""
