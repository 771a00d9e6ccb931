package wal

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"

	"github.com/jackc/pgx/v5"
	"github.com/jackc/pgx/v5/pgtype"

	"holdfast/internal/decode"
)

// pgType is one row of pg_type.
type pgType struct {
	name     string
	kind     string // typtype
	element  uint32 // of a true array, 0 otherwise
	delim    string // between elements in an array of this type
	base     uint32 // of a domain
	modifier int32  // of a domain's base
	dims     int    // of a domain's base
}

// pgTypes are types by OID, with those behind them.
type pgTypes map[uint32]pgType

// maxTypeDepth bounds domains over domains; Postgres has no cycles.
const maxTypeDepth = 32

// citext is the extension's text type, whose OID differs per database. Its
// values are written as text's are.
const citext = "citext"

// The OIDs of pg_type.dat that are named here.
const (
	oidText    = 25
	oidNumeric = 1700
)

// base gives the type behind a domain and the modifier that goes with it; a
// type that is no domain is its own.
func (c pgTypes) base(oid uint32, modifier int32) (uint32, int32) {
	for range maxTypeDepth {
		t, ok := c[oid]
		if !ok || t.kind != "d" {
			break
		}
		if t.modifier >= 0 {
			modifier = t.modifier
		}
		oid = t.base
	}
	return oid, modifier
}

// resolve puts the type at the bottom in the place of the column's own, so
// that a value of a domain is read as what it is.
func (c pgTypes) resolve(col *decode.Column) {
	col.TypeOID, col.TypeModifier = c.base(col.TypeOID, col.TypeModifier)
	t := c[col.TypeOID]
	if t.name == citext && t.kind == "b" {
		col.TypeOID = oidText
	}
	if t.element == 0 || c[t.element].delim != "," {
		return
	}
	col.Element, _ = c.base(t.element, -1)
	if e := c[col.Element]; e.name == citext && e.kind == "b" {
		col.Element = oidText
	}
}

func (c pgTypes) nameOf(oid uint32) string {
	if t, ok := c[oid]; ok {
		return t.name
	}
	return "type " + strconv.FormatUint(uint64(oid), 10)
}

// typeQuery selects the OIDs of the types that are asked for.
type typeQuery struct {
	sql string
	arg any
}

// tableTypes asks for the types of a table's columns.
func tableTypes(table uint32) typeQuery {
	return typeQuery{`SELECT atttypid AS oid FROM pg_attribute WHERE attrelid = $1 AND attnum > 0 AND NOT attisdropped`, table}
}

// readTypes reads types and those behind them: the bases of domains and the
// elements of arrays. What a type is does not change while it lives, so the
// catalogue of now answers for changes of then.
func readTypes(ctx context.Context, conn *pgx.Conn, q typeQuery) (pgTypes, error) {
	rows, err := conn.Query(ctx, `
		WITH RECURSIVE used AS (
			`+q.sql+`
			UNION
			SELECT behind.oid FROM used JOIN pg_type t ON t.oid = used.oid
			CROSS JOIN LATERAL (VALUES (t.typbasetype), (t.typelem)) AS behind (oid) WHERE behind.oid <> 0
		)
		SELECT t.oid, t.typname, t.typtype::text, CASE WHEN e.typarray = t.oid THEN t.typelem ELSE 0 END,
		       t.typdelim::text, t.typbasetype, t.typtypmod, t.typndims
		FROM used JOIN pg_type t ON t.oid = used.oid LEFT JOIN pg_type e ON e.oid = t.typelem`, q.arg)
	if err != nil {
		return nil, classify("look up types", err)
	}
	defer rows.Close()
	types := make(pgTypes)
	for rows.Next() {
		var oid uint32
		var t pgType
		if err := rows.Scan(&oid, &t.name, &t.kind, &t.element, &t.delim, &t.base, &t.modifier, &t.dims); err != nil {
			return nil, fmt.Errorf("read types: %w", err)
		}
		types[oid] = t
	}
	if err := rows.Err(); err != nil {
		return nil, classify("look up types", err)
	}
	return types, nil
}

// typeCache remembers the types that the mapped tables use. It is bounded by
// maxCachedTypes.
type typeCache struct {
	mu    sync.Mutex
	types pgTypes
}

// maxCachedTypes bounds the cache; beyond it, it begins anew.
const maxCachedTypes = 100_000

func (c *typeCache) add(types pgTypes) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.types == nil || len(c.types)+len(types) > maxCachedTypes {
		c.types = make(pgTypes, len(types))
	}
	for oid, t := range types {
		c.types[oid] = t
	}
}

// resolve resolves the columns of rel whose types are known, and gives the
// OIDs of the others.
func (c *typeCache) resolve(rel *decode.Relation) (unknown []int64) {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range rel.Columns {
		col := &rel.Columns[i]
		if _, ok := c.types[col.TypeOID]; ok {
			c.types.resolve(col)
			continue
		}
		unknown = append(unknown, int64(col.TypeOID))
	}
	return unknown
}

// builtIn knows the OIDs of Postgres' own types by name.
var builtIn = sync.OnceValue(pgtype.NewMap)

// resolveTypes resolves the types of a relation that the stream has described,
// before a row of it is decoded. A type that came after the start is looked
// up, for as long as that takes: its rows cannot be read before. One that the
// catalogue no longer has is what the stream itself said of it; failing that
// it is a text, which only text columns take.
//
// Errors: *decode.Refusal, or ctx's.
func (s *Source) resolveTypes(ctx context.Context, rel *decode.Relation, named func(uint32) (decode.TypeName, bool)) error {
	unknown := s.types.resolve(rel)
	if len(unknown) == 0 {
		return nil
	}
	retry := newBackOff()
	for attempt := 1; ; attempt++ {
		s.cfg.Beat()
		var found pgTypes
		err := s.look(ctx, func(ctx context.Context, conn *pgx.Conn) (err error) {
			found, err = readTypes(ctx, conn, typeQuery{`SELECT unnest($1::int8[])::oid AS oid`, unknown})
			return err
		})
		if err == nil {
			s.types.add(found)
			break
		}
		var refused *decode.Refusal
		if errors.As(err, &refused) || ctx.Err() != nil {
			return err
		}
		wait := retry.NextBackOff()
		s.cfg.Metrics.retries.WithLabelValues("types").Inc()
		s.log.WarnContext(ctx, "a type that the stream uses could not be looked up, trying again", "table", rel.String(), "err", err, "attempt", attempt, "wait", wait)
		if err := sleep(ctx, wait); err != nil {
			return err
		}
	}
	for _, oid := range s.types.resolve(rel) {
		t, ok := named(uint32(oid)) //nolint:gosec // it came from an OID
		if !ok || t.Schema != "pg_catalog" {
			continue
		}
		if known, ok := builtIn().TypeForName(t.Name); ok {
			for i := range rel.Columns {
				if int64(rel.Columns[i].TypeOID) == oid {
					rel.Columns[i].TypeOID = known.OID
				}
			}
		}
	}
	return nil
}
