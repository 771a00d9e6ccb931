package decode

import (
	"bytes"
	"errors"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/hamba/avro/v2"
	"github.com/riferrei/srclient"
	oracle "github.com/twmb/avro"
)

// These tests record what the libraries that were chosen for Avro do with bad
// input, so that whoever builds on them, or raises their versions, knows which
// guards are needed: decode through a Reader, demand exact consumption, bound
// counts, and never take an error's absence for success.

const avroOrder = `{"type":"record","name":"order","fields":[
	{"name":"id","type":"long"},{"name":"note","type":["null","string"]}]}`

// A payload that ends at a union's index decodes without an error in hamba's
// Unmarshal. Its Reader knows better, and twmb refuses.
func TestAvroTruncationIsSeenOnlyByTheReader(t *testing.T) {
	t.Parallel()
	schema := avro.MustParse(avroOrder)
	whole, err := avro.Marshal(schema, map[string]any{"id": 1, "note": map[string]any{"string": "a"}})
	if err != nil {
		t.Fatal(err)
	}
	cut := whole[:1]

	var row map[string]any
	if err := avro.Unmarshal(schema, cut, &row); err != nil {
		t.Fatalf("Unmarshal has learned to see it: %v", err)
	}
	reader := avro.NewReader(bytes.NewReader(cut), 64)
	reader.ReadVal(schema, &row)
	if !errors.Is(reader.Error, io.EOF) {
		t.Fatalf("the Reader says %v", reader.Error)
	}
	twmb, err := oracle.Parse(avroOrder)
	if err != nil {
		t.Fatal(err)
	}
	if _, err := twmb.Decode(cut, &row); err == nil {
		t.Fatal("the oracle accepts a payload that is cut short")
	}
}

// Bytes behind the value are ignored by Unmarshal: a payload of another
// schema passes.
func TestAvroTrailingBytesAreIgnored(t *testing.T) {
	t.Parallel()
	schema := avro.MustParse(avroOrder)
	var row map[string]any
	if err := avro.Unmarshal(schema, []byte{2, 0, 99, 99, 99}, &row); err != nil {
		t.Fatalf("Unmarshal has learned to see it: %v", err)
	}
}

// A registry's answer that is no JSON, such as a proxy's page, reaches the
// caller without a code: it must not be taken for "no such schema".
func TestRegistryErrorWithoutJSONHasNoCode(t *testing.T) {
	t.Parallel()
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		w.WriteHeader(http.StatusBadGateway)
		_, _ = io.WriteString(w, "<html>bad gateway</html>")
	}))
	t.Cleanup(server.Close)
	client := srclient.NewSchemaRegistryClient(server.URL)
	_, err := client.GetSchema(7)
	var coded srclient.Error
	if err == nil || (errors.As(err, &coded) && coded.Code != 0) {
		t.Fatalf("error %v, code %d", err, coded.Code)
	}
	if !strings.Contains(err.Error(), "502") {
		t.Errorf("not even the text has the status: %v", err)
	}
}
