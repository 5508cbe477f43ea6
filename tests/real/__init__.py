"""What strangers bring: published chat templates and models, fetched from the package index (`make test-real`)."""
