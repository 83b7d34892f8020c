"""Dashboard, rendered on the server without external resources. Start with `application`.

`snapshot` keeps what `snapshot_reader` reads for the pages, `security` and `login_pages` check tokens, logins and forms
with `logins`, `responses` keeps answers small. Each other module is a page or a family of forms.
"""
