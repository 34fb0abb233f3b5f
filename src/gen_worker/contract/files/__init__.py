"""Files: opened only where they are regular, written whole and made durable, hashed, kept from forked children."""
