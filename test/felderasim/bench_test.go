package felderasim_test

import (
	"bytes"
	"fmt"
	"io"
	"net/http"
	"testing"

	"holdfast/test/felderasim"
)

const benchSQL = `CREATE TABLE orders (
	id BIGINT NOT NULL PRIMARY KEY, customer BIGINT NOT NULL, status VARCHAR NOT NULL, amount DECIMAL(12, 2),
	created TIMESTAMP, updated TIMESTAMP, note VARCHAR, paid BOOLEAN);`

// benchBody is an array of n inserts of eight columns.
func benchBody(first, n int) []byte {
	var b bytes.Buffer
	for i := range n {
		sep := ","
		if i == 0 {
			sep = "["
		}
		fmt.Fprintf(&b, `%s{"insert":{"id":%d,"customer":%d,"status":"shipped","amount":"%d.50","created":"2026-01-02 03:04:05.123456","updated":"2026-01-02 03:04:05.123456","note":"a note of usual length","paid":true}}`,
			sep, first+i, i%1000, i)
	}
	b.WriteString("]")
	return b.Bytes()
}

func benchmarkIngress(b *testing.B, null bool) {
	b.Helper()
	sim, err := felderasim.New(felderasim.Options{SQL: benchSQL, Null: null})
	if err != nil {
		b.Fatal(err)
	}
	if err := sim.Start(b.Context()); err != nil {
		b.Fatal(err)
	}
	tr := &http.Transport{}
	defer func() {
		tr.CloseIdleConnections()
		if err := sim.Close(); err != nil {
			b.Error(err)
		}
	}()
	const rows = 5000
	bodies := make([][]byte, 20)
	for i := range bodies {
		bodies[i] = benchBody(i*rows, rows)
	}
	c := &http.Client{Transport: tr}
	b.SetBytes(int64(len(bodies[0])))
	n := 0
	for b.Loop() {
		resp, err := c.Post(sim.URL()+"/v0/pipelines/p/ingress/orders"+params, "application/json", bytes.NewReader(bodies[n%len(bodies)]))
		if err != nil {
			b.Fatal(err)
		}
		_, _ = io.Copy(io.Discard, resp.Body)
		_ = resp.Body.Close()
		if resp.StatusCode != http.StatusOK {
			b.Fatal(resp.Status)
		}
		n++
	}
	b.ReportMetric(float64(n*rows)/b.Elapsed().Seconds(), "rows/s")
}

func BenchmarkIngress(b *testing.B) { benchmarkIngress(b, false) }

func BenchmarkIngressNull(b *testing.B) { benchmarkIngress(b, true) }
