"""Dashboard, rendered on the server without external resources. Start with `application`.

`snapshot` keeps what `snapshot_reader` reads for the `pages`, `security` checks tokens, logins and forms with `logins`,
`responses` keeps answers small.
"""
