"""The shop for a person in a browser: the same session state machine that an agent acts on, drawn as web pages.

    python -m agent_system.environments.env_package.webshop.site --port 3000

Every link and button of a page is one agent action; nothing happens here that an agent could not do. Left out: accounts
and payment, and any script: the pages are plain HTML and one style sheet.
"""

from agent_system.environments.env_package.webshop.site.app import create_app

__all__ = ["create_app"]
