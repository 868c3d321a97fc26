"""How good a model is: perplexity of text, accuracy on images, and the tasks of lm-evaluation-harness."""
