"""Parts for other libraries. Each module needs the library that it is named for; nothing else imports it."""
