"""Dashboard, rendered on the server without external resources. Start with `application`.

The front page and the workers' pages show the latest `Snapshot`. `SnapshotCache` in `snapshot` keeps it, and
`SnapshotReader` in `housekeeping.insight.status` reads it, at most every two seconds. Runs, charts, plans and dead
letters are read when their page is opened. `application` registers the pages of the other modules. `security` checks
tokens, logins and forms.
"""
