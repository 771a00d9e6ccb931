package decode_test

import (
	"encoding/binary"
	"errors"
	"path/filepath"
	"runtime"
	"testing"
	"unsafe"

	"holdfast/internal/decode"
	"holdfast/test/decodecheck"
)

// The sessions were sent by real servers; test/e2e records them.
func sessions(tb testing.TB) map[string][][]byte {
	tb.Helper()
	all, err := decodecheck.Sessions(filepath.Join("testdata", "pgoutput"))
	if err != nil {
		tb.Fatal(err)
	}
	if len(all) < 10 {
		tb.Fatalf("only %d sessions are stored", len(all))
	}
	return all
}

// What real servers sent is read in full and as pglogrepl reads it; every
// message that is cut, at any byte, or has a byte too many, is refused.
func TestSessionsOfRealServers(t *testing.T) {
	t.Parallel()
	for name, session := range sessions(t) {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := decode.NewPgOutput()
			for i, raw := range session {
				for cut := range raw {
					if cut%7 != i%7 && cut < len(raw)-16 && cut > 64 {
						continue // every byte of the head and the end, one in seven between
					}
					if m, err := d.Decode(raw[:cut]); err == nil {
						t.Fatalf("message %d cut at %d of %d is read: %+v", i, cut, len(raw), m)
					}
				}
				if m, err := d.Decode(append(raw[:len(raw):len(raw)], 0)); err == nil {
					t.Fatalf("message %d with a byte too many is read: %+v", i, m)
				}
				m, err := d.Decode(raw)
				if err != nil {
					t.Fatalf("message %d (%c): %v", i, raw[0], err)
				}
				if err := decodecheck.Compare(raw, m); err != nil {
					t.Fatalf("message %d (%c): %v", i, raw[0], err)
				}
			}
		})
	}
}

// No message makes the decoder allocate above twice its size, but for the
// columns of a relation, whose number is bounded; rows allocate nothing.
func TestDecodingAllocatesLittle(t *testing.T) { //nolint:paralleltest // counts the allocations of the whole process
	const slack = 16 << 10 // the maps of a new decoder, and the runtime's own
	be := binary.BigEndian
	hostile := map[string][]byte{
		"many columns":   append([]byte("R\x00\x00\x00\x01s\x00t\x00d"), 0xff, 0xff),
		"truncates":      be.AppendUint32([]byte("T"), 0xffff_fff0),
		"a long name":    append([]byte("R\x00\x00\x00\x01"), make([]byte, 1<<20)...),
		"a long message": be.AppendUint32([]byte("M\x01\x00\x00\x00\x00\x00\x00\x00\x00p\x00"), 0x7fff_ffff),
	}
	measure := func(d *decode.PgOutput, raw []byte) uint64 {
		return allocated(func() { _, _ = d.Decode(raw) }) // what it says of the message is tested elsewhere
	}
	for name, raw := range hostile {
		if got := measure(decode.NewPgOutput(), raw); got > 2*uint64(len(raw))+slack {
			t.Errorf("%s: %d bytes for a message of %d", name, got, len(raw))
		}
	}
	for name, session := range sessions(t) {
		d := decode.NewPgOutput()
		for i, raw := range session {
			limit := 2*uint64(len(raw)) + slack
			if raw[0] == 'R' {
				limit += relationMemory
			}
			if got := measure(d, raw); got > limit {
				t.Errorf("%s, message %d (%c): %d bytes for a message of %d", name, i, raw[0], got, len(raw))
			}
			switch raw[0] {
			case 'I', 'U', 'D':
				if n := testing.AllocsPerRun(10, func() {
					if _, err := d.Decode(raw); err != nil {
						t.Fatal(err)
					}
				}); n > 0 {
					t.Errorf("%s, message %d (%c): %v allocations", name, i, raw[0], n)
				}
			}
		}
	}
}

// relationMemory is what one relation may take beside its message: a server's
// most columns.
const relationMemory = 2 * 1664 * uint64(unsafe.Sizeof(decode.Column{})+unsafe.Sizeof(decode.Value{}))

// allocated gives the bytes that the process allocates while fn runs.
func allocated(fn func()) uint64 {
	var before, after runtime.MemStats
	runtime.ReadMemStats(&before)
	fn()
	runtime.ReadMemStats(&after)
	return after.TotalAlloc - before.TotalAlloc
}

// The decoder survives any session, refuses by *Refusal alone, agrees with
// pglogrepl on whatever it accepts, and allocates no more than twice what it is
// given, but for the columns of relations and the texts of refusals.
func FuzzPgOutput(f *testing.F) {
	for _, session := range sessions(f) {
		var stream []byte
		for _, m := range session {
			stream = append(binary.BigEndian.AppendUint16(stream, uint16(len(m))), m...)
			if len(stream) > 16<<10 {
				break
			}
		}
		f.Add(stream)
	}
	f.Fuzz(func(t *testing.T, stream []byte) {
		limit := 2*uint64(len(stream)) + 64<<10
		var whole [][]byte
		for rest := stream; len(rest) >= 2; {
			n := min(int(binary.BigEndian.Uint16(rest)), len(rest)-2)
			raw := rest[2 : 2+n]
			rest = rest[2+n:]
			whole = append(whole, raw)
			limit += 2 << 10 // a refusal
			if n > 0 && raw[0] == 'R' {
				limit += relationMemory
			}
		}
		got := allocated(func() {
			d := decode.NewPgOutput()
			for _, raw := range whole {
				_, _ = d.Decode(raw) // looked at below
			}
		})
		if got > limit {
			t.Fatalf("%d bytes allocated for %d messages of %d bytes, want at most %d", got, len(whole), len(stream), limit)
		}
		d := decode.NewPgOutput()
		for _, raw := range whole {
			m, err := d.Decode(raw)
			if err != nil {
				var refusal *decode.Refusal
				if !errors.As(err, &refusal) {
					t.Fatalf("error of another type: %v", err)
				}
				continue
			}
			if err := decodecheck.Compare(raw, m); err != nil {
				t.Fatal(err)
			}
		}
	})
}
