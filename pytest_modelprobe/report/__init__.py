"""Records and findings as text, Markdown, HTML, JSON and annotations."""
