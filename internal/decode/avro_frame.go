package decode

import (
	"bytes"
	"encoding/binary"
	"encoding/hex"
	"fmt"
)

// SchemaKind says by what a message names the schema that it was written with.
type SchemaKind uint8

// The kinds.
const (
	// SchemaID: a number that a registry gave.
	SchemaID SchemaKind = iota + 1
	// SchemaGUID: a registry's 16 bytes.
	SchemaGUID
	// SchemaFingerprint: the CRC-64-AVRO of the schema.
	SchemaFingerprint
)

// SchemaRef names a schema. It is comparable.
type SchemaRef struct {
	Kind        SchemaKind
	ID          uint32
	GUID        [16]byte
	Fingerprint uint64
}

// String gives the form used in messages: "schema 7".
func (r SchemaRef) String() string {
	switch r.Kind {
	case SchemaID:
		return fmt.Sprintf("schema %d", r.ID)
	case SchemaGUID:
		return "schema " + r.GUIDText()
	case SchemaFingerprint:
		return fmt.Sprintf("the schema of fingerprint %016x", r.Fingerprint)
	}
	return "no schema"
}

// GUIDText gives the GUID with its hyphens.
func (r SchemaRef) GUIDText() string {
	text := hex.EncodeToString(r.GUID[:])
	return text[:8] + "-" + text[8:12] + "-" + text[12:16] + "-" + text[16:20] + "-" + text[20:]
}

// Schemas finds schemas. Find does not block: it gives a *PendingError where
// the schema is not here yet, and a *Refusal where there is none. It must be
// safe for concurrent use.
type Schemas interface {
	Find(ref SchemaRef) (*AvroSchema, error)
}

// The headers in which newer serializers name the schema, so that the payload
// is bare.
const (
	valueSchemaHeader = "__value_schema_id"
	keySchemaHeader   = "__key_schema_id"
)

// The first bytes of frames.
const (
	frameID          = 0x00
	frameGUID        = 0x01
	frameSingle      = 0xC3
	frameSingleMore  = 0x01
	singleHead       = 10 // two bytes and the fingerprint
	guidHead, idHead = 17, 5
)

// unframe finds which schema a message was written with, and its payload.
//
// Sources: Confluent's wire format (0x00 and a 4-byte id; 0x01 and a GUID; the
// same bytes in a header) and the Avro specification's single-object encoding
// (C3 01 and the CRC-64-AVRO fingerprint, little-endian).
func unframe(rec *Record, p part) (SchemaRef, []byte, error) {
	name := valueSchemaHeader
	if p == partKey {
		name = keySchemaHeader
	}
	body := p.of(rec)
	if head, ok := rec.Header(name); ok {
		ref, rest, ok := schemaPrefix(head)
		if !ok || len(rest) > 0 {
			return SchemaRef{}, nil, fmt.Errorf("its header %s is %s, which names no schema", name, firstBytes(head))
		}
		return ref, body, nil
	}
	if ref, rest, ok := schemaPrefix(body); ok {
		return ref, rest, nil
	}
	if len(body) >= singleHead && body[0] == frameSingle && body[1] == frameSingleMore {
		return SchemaRef{Kind: SchemaFingerprint, Fingerprint: binary.LittleEndian.Uint64(body[2:])}, body[singleHead:], nil
	}
	return SchemaRef{}, nil, &Refusal{
		Reason: ReasonMalformed, Why: "it begins with " + firstBytes(body) + ", which names no schema",
		Expected: "Avro with a schema's id (00 and four bytes), with a GUID (01 and 16 bytes, or a header), or in single-object encoding (c3 01 and eight bytes)",
		Do:       hintOf(body),
	}
}

// schemaPrefix reads a schema's name in Confluent's form.
func schemaPrefix(b []byte) (SchemaRef, []byte, bool) {
	switch {
	case len(b) >= idHead && b[0] == frameID:
		return SchemaRef{Kind: SchemaID, ID: binary.BigEndian.Uint32(b[1:])}, b[idHead:], true
	case len(b) >= guidHead && b[0] == frameGUID:
		ref := SchemaRef{Kind: SchemaGUID}
		copy(ref.GUID[:], b[1:])
		return ref, b[guidHead:], true
	}
	return SchemaRef{}, nil, false
}

func firstBytes(b []byte) string {
	if len(b) == 0 {
		return "nothing"
	}
	return "the bytes " + hex.EncodeToString(b[:min(len(b), 8)])
}

// hintOf guesses what the bytes are instead.
func hintOf(b []byte) string {
	if trimmed := bytes.TrimSpace(b); len(trimmed) > 0 && (trimmed[0] == '{' || trimmed[0] == '"') {
		return "it looks like JSON: give the topic a JSON format in KAFKASINK_TOPICS, or its keys one in KAFKASINK_KEY_FORMATS"
	}
	return "if the topic's Avro has no frame, give its schema with KAFKASINK_AVRO_SCHEMAS"
}
