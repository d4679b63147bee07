"""An HTTP server with the OpenAI API for a language model."""
