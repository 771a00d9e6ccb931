package main

// programSQL is what the pipeline under test must run. It may stand beside
// other tables: every name begins with hfc.
const programSQL = `-- The program of the contract suite: see "make contract". Statements may be
-- added beside it; nothing else may write to these tables.

CREATE TABLE hfc_types (
    id BIGINT NOT NULL PRIMARY KEY,
` + typeColumnsSQL + `
) WITH ('materialized' = 'true');

CREATE TABLE hfc_types_bag (
    id BIGINT NOT NULL,
` + typeColumnsSQL + `
) WITH ('materialized' = 'true');

CREATE TABLE hfc_kv (
    id BIGINT NOT NULL PRIMARY KEY,
    note VARCHAR,
    n BIGINT
);

CREATE TABLE hfc_pair (
    id BIGINT NOT NULL PRIMARY KEY,
    note VARCHAR,
    n BIGINT
) WITH ('materialized' = 'true');

CREATE TABLE hfc_strict (
    id BIGINT NOT NULL PRIMARY KEY,
    must VARCHAR NOT NULL,
    may VARCHAR
) WITH ('materialized' = 'true');

CREATE TABLE hfc_composite (
    k1 BIGINT NOT NULL,
    note VARCHAR,
    k2 VARCHAR NOT NULL,
    PRIMARY KEY (k2, k1)
) WITH ('materialized' = 'true');

CREATE TABLE hfc_cut (
    id BIGINT NOT NULL PRIMARY KEY,
    note VARCHAR,
    n BIGINT
) WITH ('materialized' = 'true');

CREATE TABLE hfc_bag (
    id BIGINT NOT NULL,
    note VARCHAR
) WITH ('materialized' = 'true');

CREATE TABLE hfc_hidden (
    id BIGINT NOT NULL,
    note VARCHAR
);

CREATE TABLE "HfcQuoted" (
    id BIGINT NOT NULL PRIMARY KEY,
    "Must" VARCHAR NOT NULL,
    "May" VARCHAR
) WITH ('materialized' = 'true');

CREATE MATERIALIZED VIEW hfc_view AS SELECT id, note, n FROM hfc_kv;
`

const typeColumnsSQL = `    t_boolean BOOLEAN,
    t_tinyint TINYINT,
    t_smallint SMALLINT,
    t_integer INT,
    t_bigint BIGINT,
    t_utinyint TINYINT UNSIGNED,
    t_usmallint SMALLINT UNSIGNED,
    t_uinteger INT UNSIGNED,
    t_ubigint BIGINT UNSIGNED,
    t_real REAL,
    t_double DOUBLE,
    t_decimal DECIMAL(12, 2),
    t_wide DECIMAL(28, 10),
    t_char CHAR(3),
    t_varchar VARCHAR(5),
    t_date DATE,
    t_time TIME,
    t_timestamp TIMESTAMP,
    t_timestamp_tz TIMESTAMP WITH TIME ZONE,
    t_binary BINARY(2),
    t_varbinary VARBINARY,
    t_uuid UUID,
    t_variant VARIANT,
    t_array BIGINT ARRAY,
    t_map MAP<VARCHAR, BIGINT>,
    t_row ROW(a BIGINT NULL, b VARCHAR NULL)`
