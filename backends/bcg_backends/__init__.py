"""Attention backends that come with the project; each registers through an entry point, as a stranger's would."""

__all__: list[str] = []
