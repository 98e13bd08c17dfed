"""Documents made of data that is complete: Markdown, HTML, JSON, annotations.

The words of a verdict or a diagnosis stand in the room of that thing, so that all documents say the same. A module here
arranges them for one format and escapes them for it, because names of layers and tests are untrusted. The modules are
imported directly: most runs need one or none.
"""
