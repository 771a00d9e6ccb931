package wal

import (
	"encoding/binary"
	"errors"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"holdfast/internal/decode"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

func beginMsg(xid uint32) []byte {
	msg := append([]byte{'B'}, make([]byte, 16)...)
	return binary.BigEndian.AppendUint32(msg, xid)
}

func commitMsg(end uint64) []byte {
	msg := append([]byte{'C', 0}, make([]byte, 8)...)
	msg = binary.BigEndian.AppendUint64(msg, end)
	return append(msg, make([]byte, 8)...)
}

func TestAssemblerKeepsWholeTransactions(t *testing.T) {
	t.Parallel()
	a := newAssembler(1<<20, new(buffers), nil)
	now := time.Now()
	buf := []byte("I first row")
	for _, msg := range [][]byte{beginMsg(7), []byte("R relation"), buf, []byte("Y type"), []byte("O origin"), []byte("M message"), []byte("D second row")} {
		if tx, err := a.add(msg, now); err != nil || tx != nil {
			t.Fatalf("%q: %v %v", msg, tx, err)
		}
	}
	copy(buf, "overwritten") // the wire's buffer is reused
	tx, err := a.add(commitMsg(99), now)
	if err != nil {
		t.Fatal(err)
	}
	var got []string
	if err := tx.each(func(msg []byte) error { got = append(got, string(msg)); return nil }); err != nil {
		t.Fatal(err)
	}
	if tx.end != 99 || tx.xid != 7 || tx.rows != 2 || strings.Join(got, ",") != "R relation,I first row,Y type,D second row" {
		t.Fatalf("%+v %q", tx, got)
	}
	if a.inTransaction() || a.held() != 0 {
		t.Fatal("the assembler still holds the transaction")
	}
}

func TestAssemblerRefuses(t *testing.T) {
	t.Parallel()
	for name, msgs := range map[string][][]byte{
		"row outside a transaction":  {[]byte("I row")},
		"commit without begin":       {commitMsg(1)},
		"begin inside a transaction": {beginMsg(1), beginMsg(2)},
		"empty message":              {{}},
		"unknown message":            {beginMsg(1), []byte("z")},
		"stream start of version 2":  {[]byte("S")},
		"damaged begin":              {[]byte("B12")},
		"damaged commit":             {beginMsg(1), []byte("C12")},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			a := newAssembler(1<<20, new(buffers), nil)
			var err error
			for _, msg := range msgs {
				if _, err = a.add(msg, time.Now()); err != nil {
					break
				}
			}
			var refused *decode.Refusal
			if !errors.As(err, &refused) {
				t.Fatalf("error %v", err)
			}
		})
	}
}

func TestQuoting(t *testing.T) {
	t.Parallel()
	if got := quoteLiteral(quoteIdentifier(`My "pub's"`)); got != `'"My ""pub''s"""'` {
		t.Error(got)
	}
}

func TestDSNIsNeverRepeated(t *testing.T) {
	t.Parallel()
	for _, dsn := range []string{"postgres://u:hunter2@[::1", "host=x password=hunter2 port=abc", "hunter2 hunter2", "postgres://u:hunter2@h:1/d?sslmode=hunter2"} {
		err := CheckDSN("PGSOURCE_DSN", dsn)
		if err == nil {
			t.Errorf("accepted %q", dsn)
		} else if strings.Contains(err.Error(), "hunter2") {
			t.Errorf("the error repeats the password: %v", err)
		}
	}
}
