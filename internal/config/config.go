// Package config is the one table of settings of each daemon. The reader, the
// validator, the redacted print, the help text, the fingerprint and the
// reference page (docs/configuration.md) all come from the struct tags in this
// file, so a setting cannot exist in one of them and be missing from another.
//
// It promises: every fault is reported in one error; no fault, print or page
// carries the value of a secret or any text taken from a value; a name with
// one of the daemon's prefixes that no setting has is a fault. It does not
// connect to anything: a configuration without faults may still name a server
// that is not there, which is what the `check` verb is for.
//
// Its callers are cmd/pgsource and cmd/kafkasink. Values are read once, at
// start; a restart is the reload. Only a secret that comes from a file is read
// again, by Secret.Value. What LoadPGSource and LoadKafkaSink return is not
// changed afterwards and may be shared between goroutines.
package config

import (
	"strings"
	"time"
)

// The words that settings with a closed set of values take. Which of them a
// setting takes is in its `oneof` tag.
const (
	Exit     = "exit"
	Wait     = "wait"
	Stop     = "stop"
	Ignore   = "ignore"
	Refuse   = "refuse"
	Null     = "null"
	Truncate = "truncate"
	// DeleteAll empties the destination table.
	DeleteAll = "delete_all"

	Off         = "off"
	Transaction = "transaction"
	PerTable    = "table"

	Heal = "heal"

	Auto    = "auto"
	Initial = "initial"
	Never   = "never"
	Only    = "only"

	AtLeastOnce     = "at_least_once"
	EffectivelyOnce = "effectively_once"

	Completed = "completed"
	Durable   = "durable"
	Earliest  = "earliest"
	Latest    = "latest"
	Skip      = "skip"
	DLQ       = "dlq"
	Continue  = "continue"
	Classic   = "classic"
	Consumer  = "consumer"
	Drain     = "drain"
	Abandon   = "abandon"
	Stream    = "stream"
	Peek      = "peek"
)

// The SASL mechanisms of KAFKASINK_SASL_MECHANISM.
const (
	SASLPlain       = "plain"
	SASLScramSHA256 = "scram-sha-256"
	SASLScramSHA512 = "scram-sha-512"
	SASLOAuthBearer = "oauthbearer"
	SASLAWSMSKIAM   = "aws-msk-iam"
)

// Tags of a setting, beside the `env` and `envDefault` of caarlos0/env:
//
//	help     what it does, one or two sentences
//	oneof    the allowed words, separated by |
//	min, max inclusive bounds, written as a value of the setting is
//	form     the validator for texts (see forms)
//	example  a value that the validator accepts
//
// A secret has the type Secret and can also be given as NAME_FILE.

// Feldera is how either daemon reaches the pipeline.
type Feldera struct {
	URL                string        `env:"FELDERA_URL,required" form:"url" example:"http://feldera:8080" help:"Base URL of the Feldera manager, or of one pipeline process when FELDERA_PIPELINE is not set."`
	Pipeline           string        `env:"FELDERA_PIPELINE" form:"pipeline" example:"shop" help:"Name of the pipeline. Not set: FELDERA_URL is a bare pipeline process, for which the time that an abandoned request can still be applied has no known bound."`
	APIKey             Secret        `env:"FELDERA_API_KEY" form:"token" example:"apikey:0123456789" help:"API key, sent as a bearer token. Not set: requests carry none."`
	CAFile             string        `env:"FELDERA_CA_FILE" form:"cafile" example:"/etc/holdfast/feldera-ca.pem" help:"PEM file with the certificates that sign the server's. Not set: the system's roots."`
	RequestTimeout     time.Duration `env:"FELDERA_REQUEST_TIMEOUT" envDefault:"25s" min:"1s" max:"10m" help:"How long one request may take before its outcome counts as unknown. The manager cuts requests at 30 seconds, so stay below that."`
	RequestLifetime    time.Duration `env:"FELDERA_REQUEST_LIFETIME" envDefault:"30s" min:"1s" max:"1h" help:"How long an abandoned request may still be applied. The same rows are not sent again before this has passed. Not below FELDERA_REQUEST_TIMEOUT."`
	CheckpointInterval time.Duration `env:"FELDERA_CHECKPOINT_INTERVAL" envDefault:"5s" min:"100ms" max:"10m" help:"The least time between two checkpoints that are asked for where acknowledgement waits for them (durable). It takes two of them, so rows are acknowledged up to twice this and two checkpoints later; what waits is held in memory, or in flight."`
}

// PGSource is the configuration of pgsource.
type PGSource struct {
	// Feldera and Effective are filled by LoadPGSource.
	Feldera   Feldera `env:"-"`
	Effective `env:"-"`

	DSN             Secret        `env:"PGSOURCE_DSN,required" form:"dsn" example:"postgres://holdfast@db:5432/shop?sslmode=verify-full" help:"How to reach the server, as a postgres:// URL or in keyword form, with the options of libpq. PGHOST, PGUSER, PGPASSFILE, PGSSLMODE and the other variables of libpq fill in what it leaves out. The user needs REPLICATION and, with PGSOURCE_CREATE, the right to create a publication."`
	Slot            string        `env:"PGSOURCE_SLOT" envDefault:"holdfast" form:"slot" help:"Replication slot. One slot has one pgsource."`
	Publication     string        `env:"PGSOURCE_PUBLICATION" envDefault:"holdfast" form:"pgname" help:"Publication that contains the tables, spelled as in the catalogue."`
	Tables          TableMappings `env:"PGSOURCE_TABLES,required" example:"public.orders,public.\"Items\"=items" help:"Tables to carry, separated by commas: schema.table, or schema.table=feldera_table where the names differ. Names that are not in double quotes are folded to lower case. schema.* stands for every table that the publication, or where there is none yet the schema, has at the start; an entry of its own for one of them wins."`
	Create          bool          `env:"PGSOURCE_CREATE" envDefault:"false" help:"Create the publication, then the slot, where they are absent. Never re-creates a slot that was lost."`
	SlotFailover    bool          `env:"PGSOURCE_SLOT_FAILOVER" envDefault:"false" help:"Create the slot as a failover slot, which standbys with sync_replication_slots mirror, so that it survives a promotion. Needs PostgreSQL 17."`
	Transport       string        `env:"PGSOURCE_TRANSPORT" envDefault:"stream" oneof:"stream|peek" help:"How the slot is read. stream: by the replication protocol, over a direct connection. peek: over plain SQL, with pg_logical_slot_peek_binary_changes and pg_replication_slot_advance, for poolers, proxies and firewalls that do not carry that protocol; the role needs REPLICATION all the same, and the server decodes again what is not acknowledged yet. Both use the same slot and positions, so it can be changed at a restart."`
	PeekInterval    time.Duration `env:"PGSOURCE_PEEK_INTERVAL" envDefault:"1s" min:"20ms" max:"1m" help:"With PGSOURCE_TRANSPORT=peek, the longest pause between two looks at a slot that has nothing new; after something came the next look is sooner. After each call the server is left in peace for as long as the call took."`
	State           string        `env:"PGSOURCE_STATE" envDefault:"auto" form:"state" example:"file:/var/lib/holdfast/pgsource.json" help:"Where the acknowledged position is made durable before Postgres is told of it: file:/path, postgres:schema.table for a table in the source database (or in that of PGSOURCE_STATE_DSN), or none. auto is the file /var/lib/holdfast/pgsource-SLOT.json where that folder exists, else none, with a warning."`
	StateDSN        Secret        `env:"PGSOURCE_STATE_DSN" form:"dsn" example:"postgres://holdfast@other:5432/ops?sslmode=verify-full" help:"Database of the table of PGSOURCE_STATE. Not set: the source's, where each save makes WAL of its own, so that positions without rows are saved less often."`
	BatchRows       int           `env:"PGSOURCE_BATCH_ROWS" envDefault:"10000" min:"1" max:"1000000" help:"Most rows in one request."`
	BatchBytes      Size          `env:"PGSOURCE_BATCH_BYTES" envDefault:"4MiB" min:"1KiB" max:"256MiB" help:"Most bytes in one request. Not above PGSOURCE_MEMORY_LIMIT."`
	BatchAge        time.Duration `env:"PGSOURCE_BATCH_AGE" envDefault:"0s" min:"0s" max:"1m" help:"How long the oldest row waits for more rows to share its request. 0s: a request goes out as soon as the one before it is accepted."`
	InFlight        int           `env:"PGSOURCE_IN_FLIGHT" envDefault:"8" min:"1" max:"1024" help:"Most batches that Feldera has accepted and not completed."`
	MemoryLimit     Size          `env:"PGSOURCE_MEMORY_LIMIT" envDefault:"256MiB" min:"1MiB" max:"1TiB" help:"Most bytes of received changes held in memory. Half of it is used before anything goes into the spill."`
	SpillDir        string        `env:"PGSOURCE_SPILL_DIR" form:"spilldir" example:"/var/lib/holdfast" help:"Directory on a disk for received changes that do not fit into memory: transactions larger than PGSOURCE_MEMORY_LIMIT, and a backlog that Feldera cannot take. pgsource makes a directory of its own in it, readable by its user only, and removes it. off: no spill. Not set: /var/lib/holdfast or else /var/tmp, where they can be written, otherwise no spill, which is said in the log and on /healthz. With a read-only root file system, mount a volume there or name another."`
	SpillLimit      Size          `env:"PGSOURCE_SPILL_LIMIT" envDefault:"4GiB" min:"1MiB" max:"16TiB" help:"Most bytes in the spill. When it is full too, pgsource disconnects until the backlog is delivered; a single transaction above it is refused by name."`
	Atomicity       string        `env:"PGSOURCE_ATOMICITY" envDefault:"transaction" oneof:"transaction|table" help:"What of a transaction becomes visible together in Feldera. transaction: all of it; where that takes more than one request, in a transaction of the pipeline, during which nothing else in the pipeline completes. table: the rows of each table that fit into one request. Use table where another client opens transactions in the same pipeline."`
	Delivery        string        `env:"PGSOURCE_DELIVERY" envDefault:"auto" oneof:"auto|effectively_once|at_least_once" help:"at_least_once: after a crash what was not acknowledged is sent again. effectively_once: progress is recorded in PGSOURCE_PROGRESS_TABLE behind the rows, and read at each start: what the pipeline holds is not sent again, what it lost is noticed, and what must be sent again becomes visible at once. Needs a state, PGSOURCE_ATOMICITY=transaction, a PRIMARY KEY in Feldera for each table, and the progress table, which feldera-sql prints. auto: effectively_once where all of this is so, else at_least_once, and the check delivery says why."`
	ProgressTable   string        `env:"PGSOURCE_PROGRESS_TABLE" envDefault:"holdfast_progress" form:"pgname" help:"Feldera table of PGSOURCE_DELIVERY=effectively_once, and in which is recorded, where the pipeline has it, who feeds which table; as SQL writes it. Daemons of one pipeline can share it."`
	OnLoss          string        `env:"PGSOURCE_ON_DESTINATION_LOSS" envDefault:"heal" oneof:"heal|stop" help:"The pipeline lost rows that were acknowledged, or may have: go on as phase needs resync, with /healthz at 503, the positions and the tables by name, and bring these tables to what the source has; or stop with exit code 65."`
	Snapshot        string        `env:"PGSOURCE_SNAPSHOT" envDefault:"auto" oneof:"auto|initial|never|only" help:"Which rows that are in a table already are copied, beside the stream. auto: those of all tables when pgsource makes the slot, and of tables that are added to PGSOURCE_TABLES later; of a slot that was there before the state, none, since whoever made it has loaded the tables; without a state, none. initial: also those of a slot that was there before. never: none. only: those of every table that was not copied yet; then it ends with exit code 0. Tables need a PRIMARY KEY in Feldera for it."`
	ChunkTime       time.Duration `env:"PGSOURCE_SNAPSHOT_CHUNK_TIME" envDefault:"500ms" min:"10ms" max:"1m" help:"About how long one read of a table may take. The transaction at the source is open for so long, and a TRUNCATE or ALTER of the table waits for it."`
	ChunkBytes      Size          `env:"PGSOURCE_SNAPSHOT_CHUNK_BYTES" envDefault:"8MiB" min:"64KiB" max:"1GiB" help:"Most bytes of rows that are read at once and held in memory until Feldera has them; a single row may be larger."`
	SnapshotLag     Size          `env:"PGSOURCE_SNAPSHOT_MAX_LAG" envDefault:"256MiB" min:"0B" max:"16TiB" help:"While more WAL than this is not acknowledged, no further rows are copied: the stream goes first. 0B: they are copied all the same."`
	AckOn           string        `env:"PGSOURCE_ACK_ON" envDefault:"completed" oneof:"completed|durable" help:"What the LSN waits for: completed, when Feldera has processed the rows; or durable, when a checkpoint holds them, which only pipelines with checkpoints offer: others are refused at start."`
	OnRefusal       string        `env:"PGSOURCE_ON_REFUSAL" envDefault:"exit" oneof:"exit|wait" help:"When a person has to act: exit with code 65, or wait as phase blocked with /healthz at 503. Choose wait where exited processes are restarted regardless."`
	ExtraColumns    string        `env:"PGSOURCE_EXTRA_COLUMNS" envDefault:"stop" oneof:"stop|ignore" help:"A source column that the Feldera table does not have: stop before anything is lost, or leave the column out."`
	Unrepresentable string        `env:"PGSOURCE_UNREPRESENTABLE" envDefault:"refuse" oneof:"refuse|null" help:"A value that the Feldera column has no place for (NaN, an infinity, a year before 1 or above 9999, 24:00:00): refuse the row, or send NULL where the column allows it. An integer, or a DECIMAL's whole part, that is too large is refused under either."`
	DecimalExcess   string        `env:"PGSOURCE_DECIMAL_EXCESS" envDefault:"refuse" oneof:"refuse|truncate" help:"A number or time with more digits than the Feldera column keeps: refuse the row, or cut off those behind the point. REAL and DOUBLE columns round instead. A column of the PRIMARY KEY always refuses: two rows could become one."`
	Truncate        string        `env:"PGSOURCE_TRUNCATE" envDefault:"stop" oneof:"stop|delete_all|ignore" help:"A TRUNCATE at the source: stop; or delete every row that the Feldera table has, whoever wrote it, in order with what comes before and after; or ignore it and leave the rows in Feldera, counted. delete_all needs a PRIMARY KEY in Feldera, and stops where there is none."`
	Partitions      string        `env:"PGSOURCE_PARTITIONS" envDefault:"stop" oneof:"stop|ignore" help:"A partition that is detached, dropped, attached with rows it had before, or truncated by itself, none of which the stream tells: stop within about ten seconds (twenty for a truncation), or go on, counted and logged. New partitions that are created as such are no such change."`
	ShutdownTimeout time.Duration `env:"PGSOURCE_SHUTDOWN_TIMEOUT" envDefault:"30s" min:"0s" max:"1h" help:"After the first signal, how long to wait for what is in flight to be completed and acknowledged."`
	StallTimeout    time.Duration `env:"PGSOURCE_STALL_TIMEOUT" envDefault:"1m" min:"5s" max:"1h" help:"Silence on the replication connection after which it counts as half open and is made anew. It may be below the server's wal_sender_timeout: pgsource asks the server for an answer at least every third of it."`
	SenderTimeout   time.Duration `env:"PGSOURCE_WAL_SENDER_TIMEOUT" envDefault:"0s" min:"0s" max:"1h" help:"The wal_sender_timeout that the replication connection asks the server for: silence of pgsource after which the server ends the connection and frees the slot. 0s: what the server, the database or the role has, and 1m where they have none. At least 1s otherwise."`
	TakeoverAfter   time.Duration `env:"PGSOURCE_TAKEOVER_AFTER" envDefault:"30s" min:"0s" max:"1h" help:"Another pgsource holds the slot and nothing was heard of it for this long: it is taken for dead, and its session at the server is ended. 0s: never; wal_sender_timeout does it. At least 15s otherwise, since a pgsource that lives is heard of every ten seconds."`
	VerifyInterval  time.Duration `env:"PGSOURCE_VERIFY_INTERVAL" envDefault:"0s" min:"0s" max:"720h" help:"How often pgsource compares its tables with the pipeline's while it runs, for the check verify and the metrics pgsource_verify_*: each row is read on both sides. 0s: never."`
	VerifyRate      int           `env:"PGSOURCE_VERIFY_RATE" envDefault:"2000" min:"0" max:"10000000" help:"Most rows a second that such a comparison reads of each side. 0: as many as come."`
	Listen          string        `env:"PGSOURCE_LISTEN" envDefault:"127.0.0.1:8081" form:"address" help:"Address of /healthz, /livez, /readyz and /metrics. It has no authentication."`
	LogLevel        string        `env:"PGSOURCE_LOG_LEVEL" envDefault:"info" oneof:"debug|info|warn|error" help:"Least severe level that is logged."`
	LogFormat       string        `env:"PGSOURCE_LOG_FORMAT" envDefault:"text" oneof:"text|json" help:"Form of the log lines on stderr."`
}

// KafkaSink is the configuration of kafkasink.
type KafkaSink struct {
	// Feldera and Effective are filled by LoadKafkaSink.
	Feldera   Feldera `env:"-"`
	Effective `env:"-"`

	Brokers          []string      `env:"KAFKASINK_BROKERS,required" form:"brokers" example:"kafka-1:9092,kafka-2:9092" help:"Brokers to ask first, separated by commas, each as host:port."`
	Group            string        `env:"KAFKASINK_GROUP" envDefault:"holdfast" form:"group" help:"Consumer group. Its committed offsets are the acknowledged positions."`
	InstanceID       string        `env:"KAFKASINK_INSTANCE_ID" form:"group" example:"kafkasink-0" help:"Makes this a static member of the group (group.instance.id): after a stop its partitions wait for it until the session time-out, so that a quick restart moves nothing. No two processes may have the same. Not set: a dynamic member, which leaves the group at a stop."`
	GroupProtocol    string        `env:"KAFKASINK_GROUP_PROTOCOL" envDefault:"classic" oneof:"classic|consumer" help:"How the group assigns partitions: classic, by its members; or consumer, by the brokers (KIP-848), which takes brokers of version 4.3 or newer and has its session time-out on the broker (group.consumer.session.timeout.ms), above which KAFKASINK_SESSION_TIMEOUT must not be. All members must have the same."`
	Topics           TopicMappings `env:"KAFKASINK_TOPICS,required" example:"orders=orders:json,items=items:json" help:"Topics to carry, separated by commas, each as topic=feldera_table:format, or for all topics whose whole name matches a regular expression, ~\"regex\"=feldera_table:format. docs/formats.md describes the formats."`
	Columns          FieldColumns  `env:"KAFKASINK_COLUMNS" example:"orders/cust_id=customer,*/@offset=kafka_offset" help:"Columns that take a field of another name, or what stands beside the row: @topic, @partition, @offset, @timestamp, @headers, @header.NAME, @key for a key that is one value, @key.FIELD. Each as topic/source=column; * stands for every topic."`
	FieldTypes       FieldTypes    `env:"KAFKASINK_FIELD_TYPES" example:"orders/price=decimal(2),orders/due=io.debezium.time.Date" help:"What the values of a field mean where the record does not say it, as Debezium's JSON without schemas. Each as topic/field=type; docs/formats.md has the types."`
	KeyFormats       KeyFormats    `env:"KAFKASINK_KEY_FORMATS" example:"orders=text" help:"How the keys of a topic's records are written, each as topic=format. Not set: auto, which is JSON, or text where a key is no JSON."`
	OpField          string        `env:"KAFKASINK_OP_FIELD" envDefault:"__op" form:"text" help:"For op-json: the field that says what to do with the row. Its words are insert, update, delete, their first letters, and true and false for a field such as __deleted."`
	Tombstones       string        `env:"KAFKASINK_TOMBSTONES" envDefault:"delete" oneof:"delete|ignore|stop" help:"A record without a value: delete the row with the record's key, ignore it and count it, or treat it as a record that can never be decoded."`
	ControlMessages  string        `env:"KAFKASINK_CONTROL_MESSAGES" envDefault:"ignore" oneof:"ignore|stop" help:"A message of Debezium that carries no row (a transaction's boundary, a heartbeat, a change of schema): ignore it and count it, or treat it as a record that can never be decoded."`
	Truncate         string        `env:"KAFKASINK_TRUNCATE" envDefault:"stop" oneof:"stop|ignore" help:"A truncation in a Debezium topic: treat it as a record that can never be delivered, or ignore it, count it and leave the rows in Feldera."`
	Unavailable      string        `env:"KAFKASINK_UNAVAILABLE_VALUE" envDefault:"__debezium_unavailable_value" form:"text" help:"What Debezium writes for a value that did not change and is not in the log: its unavailable.value.placeholder."`
	RegistryURL      string        `env:"KAFKASINK_REGISTRY_URL" form:"url" example:"https://registry:8081" help:"Base URL of the schema registry, for Avro topics. Not set: schemas come from KAFKASINK_SCHEMA_FILES and KAFKASINK_AVRO_SCHEMAS alone."`
	RegistryCAFile   string        `env:"KAFKASINK_REGISTRY_CA_FILE" form:"cafile" example:"/etc/holdfast/registry-ca.pem" help:"PEM file with the certificates that sign the registry's. Not set: the system's roots."`
	RegistryUser     string        `env:"KAFKASINK_REGISTRY_USER" form:"text" example:"holdfast" help:"User for basic authentication at the registry."`
	RegistryPassword Secret        `env:"KAFKASINK_REGISTRY_PASSWORD" form:"text" example:"correct horse" help:"Password for KAFKASINK_REGISTRY_USER."`
	RegistryToken    Secret        `env:"KAFKASINK_REGISTRY_TOKEN" form:"token" example:"0123456789" help:"Token for the registry, sent as a bearer token. Not together with KAFKASINK_REGISTRY_USER."`
	RegistryTimeout  time.Duration `env:"KAFKASINK_REGISTRY_TIMEOUT" envDefault:"5s" min:"100ms" max:"5m" help:"How long one request to the registry may take. Partitions that need a schema wait, and it is asked for until it is there; the others go on."`
	SchemaFiles      SchemaFiles   `env:"KAFKASINK_SCHEMA_FILES" example:"7=/etc/holdfast/order-7.avsc,/etc/holdfast/order.avsc" help:"Avro schemas that are known without asking the registry, each as id=file, or guid=file, or a file alone for what names its schema by fingerprint (single-object encoding). By its fingerprint every file is known."`
	AvroSchemas      AvroSchemas   `env:"KAFKASINK_AVRO_SCHEMAS" example:"orders/value=/etc/holdfast/order.avsc" help:"For topics whose Avro names no schema: the file with the one that all of its values, or keys, were written with, each as topic/value=file or topic/key=file."`
	Start            string        `env:"KAFKASINK_START" envDefault:"earliest" oneof:"earliest|latest|stop" help:"Where to begin on a partition for which the group has never committed: the oldest record, after the newest, or stop and ask."`
	OnGap            string        `env:"KAFKASINK_ON_GAP" envDefault:"stop" oneof:"stop|continue" help:"What comes next in the log is gone (retention, truncation, a topic made anew): stop with the numbers, or go on from the oldest record there is and count the gap."`
	Poison           string        `env:"KAFKASINK_POISON" envDefault:"stop" oneof:"stop|dlq|skip" help:"A record that can never be delivered, since it cannot be decoded or Feldera refuses its row: stop its partition while the others go on; write it to KAFKASINK_DLQ_TOPIC and go on when it is there; or skip it and count it."`
	DLQTopic         string        `env:"KAFKASINK_DLQ_TOPIC" form:"topic" example:"orders-dead" help:"Dead-letter topic for KAFKASINK_POISON=dlq, and for the verbs dlq list, show and redrive. It must exist, and be none of KAFKASINK_TOPICS."`
	PoisonLimit      int           `env:"KAFKASINK_POISON_LIMIT" envDefault:"100" min:"1" max:"100000" help:"Most records of one topic that dlq or skip may set aside within KAFKASINK_POISON_WINDOW; one more stops its partition."`
	PoisonWindow     time.Duration `env:"KAFKASINK_POISON_WINDOW" envDefault:"1m" min:"1s" max:"24h" help:"See KAFKASINK_POISON_LIMIT."`
	Revoke           string        `env:"KAFKASINK_REVOKE" envDefault:"drain" oneof:"drain|abandon" help:"A partition is taken away: wait for the evidence on what was sent and commit it, or give it up at once and let the next owner send it again."`
	DrainTimeout     time.Duration `env:"KAFKASINK_DRAIN_TIMEOUT" envDefault:"20s" min:"100ms" max:"15m" help:"Longest wait for evidence when a partition is taken away, and at a stop. What has no evidence then is sent again by the next owner."`
	CommitInterval   time.Duration `env:"KAFKASINK_COMMIT_INTERVAL" envDefault:"1s" min:"10ms" max:"1m" help:"Time between offset commits."`
	BatchRows        int           `env:"KAFKASINK_BATCH_ROWS" envDefault:"10000" min:"1" max:"1000000" help:"Most rows in one request."`
	BatchBytes       Size          `env:"KAFKASINK_BATCH_BYTES" envDefault:"4MiB" min:"1KiB" max:"256MiB" help:"Most bytes in one request. Not above KAFKASINK_MEMORY_LIMIT."`
	BatchAge         time.Duration `env:"KAFKASINK_BATCH_AGE" envDefault:"0s" min:"0s" max:"1m" help:"How long the oldest row waits for more rows to share its request. 0s: a request goes out as soon as the one before it is accepted."`
	InFlight         int           `env:"KAFKASINK_IN_FLIGHT" envDefault:"8" min:"1" max:"1024" help:"Most batches that Feldera has accepted and not completed."`
	LaneMemory       Size          `env:"KAFKASINK_LANE_MEMORY" envDefault:"16MiB" min:"64KiB" max:"1TiB" help:"Most bytes of records held for one partition; above it the partition is paused. Not above KAFKASINK_MEMORY_LIMIT."`
	MemoryLimit      Size          `env:"KAFKASINK_MEMORY_LIMIT" envDefault:"256MiB" min:"1MiB" max:"1TiB" help:"Most bytes of records held for all partitions together."`
	SessionTimeout   time.Duration `env:"KAFKASINK_SESSION_TIMEOUT" envDefault:"45s" min:"1s" max:"30m" help:"Silence after which the group takes this member for dead. The broker has its own bounds for it."`
	RebalanceTimeout time.Duration `env:"KAFKASINK_REBALANCE_TIMEOUT" envDefault:"1m" min:"1s" max:"30m" help:"How long the group waits for members in a rebalance. At least twice KAFKASINK_DRAIN_TIMEOUT."`
	TLS              bool          `env:"KAFKASINK_TLS" envDefault:"false" help:"Speak TLS to the brokers."`
	CAFile           string        `env:"KAFKASINK_CA_FILE" form:"cafile" example:"/etc/holdfast/kafka-ca.pem" help:"PEM file with the certificates that sign the brokers'. Needs KAFKASINK_TLS. Not set: the system's roots."`
	ClientCertFile   string        `env:"KAFKASINK_CLIENT_CERT_FILE" form:"cafile" example:"/etc/holdfast/kafka-client.pem" help:"PEM file with the client's certificate, for brokers that ask for one; read again for each connection. Needs KAFKASINK_TLS and KAFKASINK_CLIENT_KEY_FILE."`
	ClientKeyFile    string        `env:"KAFKASINK_CLIENT_KEY_FILE" form:"keyfile" example:"/etc/holdfast/kafka-client.key" help:"PEM file with the unencrypted key of KAFKASINK_CLIENT_CERT_FILE; read again for each connection."`
	ServerName       string        `env:"KAFKASINK_SERVER_NAME" form:"text" example:"kafka.internal" help:"Name to expect in the brokers' certificates. Not set: the one that is dialed. Needs KAFKASINK_TLS."`
	SASLMechanism    string        `env:"KAFKASINK_SASL_MECHANISM" oneof:"plain|scram-sha-256|scram-sha-512|oauthbearer|aws-msk-iam" help:"How to log in to the brokers. Not set: no login. plain and oauthbearer send the secret as it is, so use them with KAFKASINK_TLS."`
	SASLUser         string        `env:"KAFKASINK_SASL_USER" form:"text" example:"holdfast" help:"User for KAFKASINK_SASL_MECHANISM: the client's id where a token is fetched, the access key id for aws-msk-iam."`
	SASLPassword     Secret        `env:"KAFKASINK_SASL_PASSWORD" form:"text" example:"correct horse" help:"Password for KAFKASINK_SASL_USER: the client's secret where a token is fetched, the secret access key for aws-msk-iam."`
	SASLToken        Secret        `env:"KAFKASINK_SASL_TOKEN" form:"token" example:"eyJhbGciOiJub25lIn0.e30." help:"Bearer token for oauthbearer, mostly given as a file that something else keeps fresh; the session token for aws-msk-iam, where there is one."`
	SASLTokenURL     string        `env:"KAFKASINK_SASL_TOKEN_URL" form:"tokenurl" example:"https://login.example.com/oauth2/token" help:"Endpoint that gives oauthbearer a token by the client credentials grant, for KAFKASINK_SASL_USER and KAFKASINK_SASL_PASSWORD. Not together with KAFKASINK_SASL_TOKEN."`
	SASLScope        string        `env:"KAFKASINK_SASL_SCOPE" form:"text" example:"kafka" help:"Scope to ask for at KAFKASINK_SASL_TOKEN_URL."`
	Delivery         string        `env:"KAFKASINK_DELIVERY" envDefault:"auto" oneof:"auto|effectively_once|at_least_once" help:"at_least_once: after a crash what was not committed is sent again. effectively_once: progress is recorded in KAFKASINK_PROGRESS_TABLE behind the rows, and read when a partition is taken: what the pipeline holds is not sent again, and what it lost is noticed. Needs a PRIMARY KEY in Feldera for each table, and the progress table, which feldera-sql prints. auto: effectively_once where the pipeline allows it, else at_least_once, and the check delivery says why."`
	OnLoss           string        `env:"KAFKASINK_ON_DESTINATION_LOSS" envDefault:"heal" oneof:"heal|stop" help:"The pipeline lost rows that were committed. heal: with effectively_once, deliver again from what it holds, or from the log's start where retention has taken that, which stays on /healthz with the offsets; the group's offset goes back. stop: stop the partition with both positions. With at_least_once nobody can tell what is lost: heal says so and goes on, stop stops at a restart of the pipeline."`
	AckOn            string        `env:"KAFKASINK_ACK_ON" envDefault:"completed" oneof:"completed|durable" help:"What offsets wait for: completed, when Feldera has processed the rows; or durable, when a checkpoint holds them, which only pipelines with checkpoints offer: others are refused at start. Batches stay in flight until then, so raise KAFKASINK_IN_FLIGHT."`
	ProgressTable    string        `env:"KAFKASINK_PROGRESS_TABLE" envDefault:"holdfast_progress" form:"pgname" help:"Feldera table in which progress is recorded (KAFKASINK_DELIVERY), and that this group feeds its tables, so that nobody takes away its rows; as SQL writes it. Where the pipeline has none, nothing is recorded. Daemons of one pipeline can share it; pgsource feldera-sql prints it."`
	OnRefusal        string        `env:"KAFKASINK_ON_REFUSAL" envDefault:"exit" oneof:"exit|wait" help:"When a person has to act for all partitions: exit with code 65, or wait as phase blocked with /healthz at 503. Choose wait where exited processes are restarted regardless."`
	Unrepresentable  string        `env:"KAFKASINK_UNREPRESENTABLE" envDefault:"refuse" oneof:"refuse|null" help:"A value that the Feldera column has no place for (NaN, an infinity, a year before 1 or above 9999, 24:00:00): refuse the record, or send NULL where the column allows it. An integer, or a DECIMAL's whole part, that is too large is refused under either."`
	DecimalExcess    string        `env:"KAFKASINK_DECIMAL_EXCESS" envDefault:"refuse" oneof:"refuse|truncate" help:"A number or time with more digits than the Feldera column keeps: refuse the record, or cut off those behind the point. REAL and DOUBLE columns round instead. A column of the PRIMARY KEY always refuses: two rows could become one."`
	ExtraFields      string        `env:"KAFKASINK_EXTRA_FIELDS" envDefault:"ignore" oneof:"stop|ignore" help:"A field that the Feldera table does not have: stop the partition, or leave the field out."`
	Listen           string        `env:"KAFKASINK_LISTEN" envDefault:"127.0.0.1:8082" form:"address" help:"Address of /healthz, /livez, /readyz and /metrics. It has no authentication."`
	LogLevel         string        `env:"KAFKASINK_LOG_LEVEL" envDefault:"info" oneof:"debug|info|warn|error" help:"Least severe level that is logged."`
	LogFormat        string        `env:"KAFKASINK_LOG_FORMAT" envDefault:"text" oneof:"text|json" help:"Form of the log lines on stderr."`
}

// LoadPGSource reads the settings of pgsource from environ, whose entries are
// NAME=value as os.Environ gives them. It looks at names that begin with
// PGSOURCE_ or FELDERA_ and at no other. A variable that is set to nothing
// counts as not set. The error is a *Faults with everything that is wrong.
func LoadPGSource(environ []string) (*PGSource, error) {
	c := new(PGSource)
	r, err := read(environ, []string{pgsourcePrefix, felderaPrefix}, &c.Feldera, c)
	if err != nil {
		return nil, err
	}
	c.Feldera.relations(r)
	r.require(c.BatchBytes <= c.MemoryLimit, "PGSOURCE_BATCH_BYTES", "is above PGSOURCE_MEMORY_LIMIT",
		"at most PGSOURCE_MEMORY_LIMIT", "PGSOURCE_MEMORY_LIMIT")
	r.require(c.SenderTimeout == 0 || c.SenderTimeout >= time.Second, "PGSOURCE_WAL_SENDER_TIMEOUT",
		"is so short that the server would end healthy connections", "0s or at least 1s")
	r.require(!c.StateDSN.IsSet() || strings.HasPrefix(c.State, stateTable), "PGSOURCE_STATE_DSN", "is set although PGSOURCE_STATE is no table",
		"only together with PGSOURCE_STATE=postgres:schema.table", "PGSOURCE_STATE")
	r.require(c.TakeoverAfter == 0 || c.TakeoverAfter >= 15*time.Second, "PGSOURCE_TAKEOVER_AFTER",
		"is so short that a pgsource that lives could be taken for dead", "0s or at least 15s")
	if c.Snapshot == Initial || c.Snapshot == Only {
		place := c.StatePlace()
		r.require(place.Path != "" || place.Table != "", "PGSOURCE_STATE", "keeps nothing, so a restart in the middle of a copy would not know of it",
			"a file or a table with PGSOURCE_SNAPSHOT="+c.Snapshot, "PGSOURCE_SNAPSHOT")
	}
	if c.Delivery == EffectivelyOnce {
		r.require(c.Atomicity == Transaction, "PGSOURCE_ATOMICITY", "lets what is sent again after a crash be seen table by table",
			"transaction with PGSOURCE_DELIVERY=effectively_once", "PGSOURCE_DELIVERY")
		place := c.StatePlace()
		r.require(place.Path != "" || place.Table != "", "PGSOURCE_STATE", "keeps nothing, so nobody could tell a loss from a first start",
			"a file or a table with PGSOURCE_DELIVERY=effectively_once", "PGSOURCE_DELIVERY")
	}
	if c.Effective, err = r.finish(); err != nil {
		return nil, err
	}
	return c, nil
}

// LoadKafkaSink reads the settings of kafkasink; see LoadPGSource. It looks at
// names that begin with KAFKASINK_ or FELDERA_ and at no other.
func LoadKafkaSink(environ []string) (*KafkaSink, error) {
	c := new(KafkaSink)
	r, err := read(environ, []string{kafkasinkPrefix, felderaPrefix}, &c.Feldera, c)
	if err != nil {
		return nil, err
	}
	c.Feldera.relations(r)
	r.require(c.BatchBytes <= c.MemoryLimit, "KAFKASINK_BATCH_BYTES", "is above KAFKASINK_MEMORY_LIMIT",
		"at most KAFKASINK_MEMORY_LIMIT", "KAFKASINK_MEMORY_LIMIT")
	r.require(c.LaneMemory <= c.MemoryLimit, "KAFKASINK_LANE_MEMORY", "is above KAFKASINK_MEMORY_LIMIT",
		"at most KAFKASINK_MEMORY_LIMIT", "KAFKASINK_MEMORY_LIMIT")
	// A member that drains for longer than the group waits is thrown out, and
	// its commit at the end of the drain is refused: the drain was in vain.
	r.require(c.RebalanceTimeout >= 2*c.DrainTimeout, "KAFKASINK_REBALANCE_TIMEOUT",
		"is less than twice KAFKASINK_DRAIN_TIMEOUT, so the group would give up on a member that is still draining",
		"at least 2 x KAFKASINK_DRAIN_TIMEOUT", "KAFKASINK_DRAIN_TIMEOUT")
	r.require(c.Poison != DLQ || c.DLQTopic != "", "KAFKASINK_DLQ_TOPIC", "is not set although KAFKASINK_POISON is dlq",
		"the name of a topic", "KAFKASINK_POISON")
	for _, t := range c.Topics {
		r.require(c.DLQTopic == "" || t.Topic != c.DLQTopic, "KAFKASINK_DLQ_TOPIC", "is one of KAFKASINK_TOPICS, so a bad record would come round for ever",
			"a topic of its own", "KAFKASINK_TOPICS")
	}
	c.companions(r)
	c.schemas(r)
	c.connection(r)
	if c.Effective, err = r.finish(); err != nil {
		return nil, err
	}
	return c, nil
}

// relations checks what two settings of the group say together.
func (f *Feldera) relations(r *reading) {
	r.require(f.RequestLifetime >= f.RequestTimeout, "FELDERA_REQUEST_LIFETIME",
		"is less than FELDERA_REQUEST_TIMEOUT, so rows could be sent again while the first request is still running",
		"at least FELDERA_REQUEST_TIMEOUT", "FELDERA_REQUEST_TIMEOUT")
	r.require(f.CAFile == "" || !isPlainHTTP(f.URL), "FELDERA_CA_FILE", "is set although FELDERA_URL is not https",
		"only together with an https URL", "FELDERA_URL")
}
