"""The tables of the database, as the steps that make them. Never change a released step: add another one.

Every row has an `owner`, the id of an API key (empty where there are no keys), or belongs to a row that has one.
Times are Unix seconds.
"""

CONVERSED: tuple[str, ...] = (
    "CREATE TABLE IF NOT EXISTS responses (owner TEXT NOT NULL, id TEXT NOT NULL, used INTEGER NOT NULL, "
    "num_bytes INTEGER NOT NULL, num_values INTEGER NOT NULL, num_before INTEGER NOT NULL, "
    "num_inputs INTEGER NOT NULL, response BLOB NOT NULL, items BLOB NOT NULL, PRIMARY KEY (owner, id))",
    "CREATE INDEX IF NOT EXISTS by_use ON responses (owner, used, num_bytes)",
    # Responses that are not finished, and when their frontend must have renewed their lease.
    "CREATE TABLE IF NOT EXISTS running_responses (owner TEXT NOT NULL, id TEXT NOT NULL, until REAL NOT NULL, "
    "PRIMARY KEY (owner, id)) WITHOUT ROWID",
    "CREATE TABLE IF NOT EXISTS conversations (owner TEXT NOT NULL, id TEXT NOT NULL, used INTEGER NOT NULL, "
    "num_bytes INTEGER NOT NULL, created_at INTEGER NOT NULL, metadata BLOB NOT NULL, PRIMARY KEY (owner, id))",
    "CREATE TABLE IF NOT EXISTS conversation_items (owner TEXT NOT NULL, conversation TEXT NOT NULL, "
    "position INTEGER NOT NULL, id TEXT NOT NULL, item BLOB NOT NULL, PRIMARY KEY (owner, conversation, position))",
    "CREATE UNIQUE INDEX IF NOT EXISTS items_by_id ON conversation_items (owner, conversation, id)",
)
"""Stored responses and conversations; these may also be in a file of their own, which has no version."""

REFERRED: tuple[str, ...] = (
    # Which responses have an item. Of several, the one with the highest number was stored last.
    "CREATE TABLE IF NOT EXISTS response_items (number INTEGER PRIMARY KEY, owner TEXT NOT NULL, id TEXT NOT NULL, "
    "response TEXT NOT NULL, FOREIGN KEY (owner, response) REFERENCES responses (owner, id) ON DELETE CASCADE)",
    # The responses of older versions. A file of its own comes here at each opening, and is filled only once.
    "INSERT INTO response_items (owner, id, response) "
    "SELECT owner, json_extract(item.value, '$.id') AS item_id, responses.id "
    "FROM responses, json_each(CAST(items AS TEXT)) AS item "
    "WHERE item_id IS NOT NULL AND NOT EXISTS (SELECT 1 FROM response_items) ORDER BY used",
    "CREATE INDEX IF NOT EXISTS response_items_by_id ON response_items (owner, id)",
    "CREATE INDEX IF NOT EXISTS response_items_by_response ON response_items (owner, response)",
    "CREATE INDEX IF NOT EXISTS items_of_owner ON conversation_items (owner, id)",
)
"""Where the items of stored responses and conversations are, for references to them; also in a file of their own."""

STEPS: tuple[tuple[str, ...], ...] = (
    (
        # Leases, for work that only one of the processes that share the database may do at a time.
        "CREATE TABLE leases (name TEXT PRIMARY KEY, holder TEXT NOT NULL, until REAL NOT NULL) WITHOUT ROWID",
    ),
    (
        "CREATE TABLE files (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, "
        "num_bytes INTEGER NOT NULL, created_at INTEGER NOT NULL, filename TEXT NOT NULL, purpose TEXT NOT NULL, "
        "expires_at INTEGER)",
        "CREATE INDEX files_of_owner ON files (owner, number)",
        # `facts` is the batch as the API shows it, without its counts; `tenant` is the tenant that it runs for.
        "CREATE TABLE batches (number INTEGER PRIMARY KEY AUTOINCREMENT, id TEXT NOT NULL UNIQUE, owner TEXT NOT NULL, "
        "tenant TEXT NOT NULL, input_file_id TEXT NOT NULL, is_live INTEGER NOT NULL, facts TEXT NOT NULL, "
        "num_lines INTEGER NOT NULL DEFAULT 0, num_completed INTEGER NOT NULL DEFAULT 0, "
        "num_failed INTEGER NOT NULL DEFAULT 0)",
        "CREATE INDEX batches_of_owner ON batches (owner, number)",
        "CREATE INDEX live_batches ON batches (number) WHERE is_live",
        # The answer to each line of a batch until the batch ends, in the form in which its two files will have it.
        "CREATE TABLE answers (batch INTEGER NOT NULL REFERENCES batches (number) ON DELETE CASCADE, "
        "line INTEGER NOT NULL, is_error INTEGER NOT NULL, content BLOB NOT NULL, PRIMARY KEY (batch, line))",
    ),
    CONVERSED,
    REFERRED,
)
"""Step n, a tuple of statements, migrates from version n to version n + 1 (`PRAGMA user_version`)."""
