"""Dashboard, rendered on the server without external resources. Start with `application`.

`snapshot` reads what the pages show, `actions` handles the forms, and `security` checks the token and the forms.
"""
