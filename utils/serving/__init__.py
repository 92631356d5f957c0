"""Serving: export a model, serve it tensor parallel, and talk to it (lesson 16)."""
