"""Serves language and embedding models over HTTP, in the API of OpenAI."""
