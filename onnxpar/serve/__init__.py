"""Language models over HTTP, in the API of OpenAI."""
