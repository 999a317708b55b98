"""The headers of a page that runs its own script alone, and asks nobody but its server.

The policy never lets text become markup: what is shown may be a model's.
"""

from __future__ import annotations


def page_headers(script: str, style: str, images: str = "data:") -> dict[str, str]:
    """Headers for everything that a page is made of. `script`, `style` and `images` are the sources
    that it may have, as a Content-Security-Policy writes them."""
    policy = (
        f"default-src 'none'; script-src {script}; style-src {style}; connect-src 'self';"
        f" img-src {images}; base-uri 'none'; form-action 'none'; frame-ancestors 'none';"
        " require-trusted-types-for 'script'; trusted-types 'none'"
    )
    return {
        "Content-Security-Policy": policy,
        "X-Content-Type-Options": "nosniff",
        "Referrer-Policy": "no-referrer",
        "Cross-Origin-Resource-Policy": "same-origin",
        "Cache-Control": "no-store",
    }
