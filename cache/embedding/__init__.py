"""From text to vector: the model, the queue in front of it, and the HTTP route that offers it to others."""
