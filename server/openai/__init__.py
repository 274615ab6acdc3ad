"""The OpenAI HTTP API: wire models, translation to requests, rendering of answers, streaming."""
