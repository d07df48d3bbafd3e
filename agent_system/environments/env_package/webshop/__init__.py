"""WebShop: a text shopping site with goals and rewards, and the vectorised environment over it."""
