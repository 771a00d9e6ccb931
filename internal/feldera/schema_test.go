package feldera

import (
	"errors"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"

	"holdfast/internal/decode"
)

const program = `{"name":"p","program_status":"Success","program_info":{"schema":{"inputs":[
 {"name":"ORDERS","case_sensitive":false,"fields":[
  {"name":"ID","case_sensitive":false,"columntype":{"type":"BIGINT","nullable":false},"unused":false},
  {"name":"amount","case_sensitive":false,"columntype":{"type":"DECIMAL","nullable":true,"precision":12,"scale":2}},
  {"name":"Tags","case_sensitive":true,"columntype":{"type":"ARRAY","nullable":true,"component":{"type":"VARCHAR","nullable":true,"precision":-1}}},
  {"name":"attrs","case_sensitive":false,"columntype":{"type":"MAP","nullable":true,"key":{"type":"VARCHAR","nullable":false},"value":{"type":"INTEGER","nullable":true}}},
  {"name":"addr","case_sensitive":false,"columntype":{"nullable":true,"fields":[
     {"name":"street","case_sensitive":false,"columntype":{"type":"VARCHAR","nullable":true}},{"name":"no","type":"INTEGER","nullable":false}]}}
 ],"materialized":false,"properties":{"append_only":{"value":"true"}},"primary_key":["ID"]},
 {"name":"Orders","case_sensitive":true,"fields":[{"name":"v","case_sensitive":false,"columntype":{"type":"VARIANT","nullable":true}}],"primary_key":null}
],"outputs":[]}}}`

func TestDescribe(t *testing.T) {
	c, s := newScripted(t, Config{}, func(int, seen) answer { return answer{status: 200, body: program} })
	schema, err := c.Describe(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if diff := cmp.Diff([]string{"GET "}, s.paths()); diff != "" {
		t.Error(diff)
	}
	for _, name := range []string{"orders", "ORDERS", "Orders", `"orders"`} {
		table, err := schema.Table(name)
		if err != nil {
			t.Fatal(err)
		}
		if table.Name != "orders" || table.Spelling() != "orders" || !table.HasKey() || !table.Materialized || !table.AppendOnly {
			t.Errorf("%s: %+v", name, table)
		}
	}
	table, err := schema.Table(`"Orders"`)
	if err != nil {
		t.Fatal(err)
	}
	if table.Spelling() != `"Orders"` || table.HasKey() ||
		table.ingressPath() != "/ingress/%22Orders%22?format=json&update_format=insert_delete&array=true" {
		t.Errorf("%+v %s", table, table.ingressPath())
	}
	orders, _ := schema.Table("orders")
	var types []string
	for _, col := range orders.Columns {
		types = append(types, col.Name+" "+col.Type.String())
	}
	if diff := cmp.Diff([]string{"id BIGINT", "amount DECIMAL(12,2)", "Tags VARCHAR ARRAY", "attrs MAP<VARCHAR, INTEGER>", "addr ROW(street VARCHAR NULL, no INTEGER)"}, types); diff != "" {
		t.Error(diff)
	}
	want := &decode.Relation{Name: "orders", Identity: decode.IdentityDefault, Columns: []decode.Column{
		{Name: "id", Key: true}, {Name: "amount"}, {Name: "Tags"}, {Name: "attrs"}, {Name: "addr"},
	}}
	if diff := cmp.Diff(want, orders.Relation()); diff != "" {
		t.Error(diff)
	}
	_, err = schema.Table("ordes")
	var refused *decode.Refusal
	if !errors.As(err, &refused) || refused.Reason != decode.ReasonSchema || !strings.Contains(refused.Expected, `"Orders" or orders`) {
		t.Errorf("got %v", err)
	}
}

func TestDescribeBareProcess(t *testing.T) {
	c, s := newScripted(t, Config{URL: "http://process.test"}, func(n int, _ seen) answer {
		if n == 1 {
			return answer{status: 200, body: `{"schema":{"inputs":[{"name":"t","fields":[{"name":"a","columntype":{"type":"BIGINT","nullable":false}}]}]}}`}
		}
		return answer{status: 404, body: "not found"}
	})
	schema, err := c.Describe(t.Context())
	if err != nil || len(schema.Names()) != 1 {
		t.Fatal(schema, err)
	}
	_, err = c.Describe(t.Context())
	var refused *decode.Refusal
	if !errors.As(err, &refused) || !strings.Contains(refused.Do, "--metadata-file") || s.paths()[0] != "GET /metadata" {
		t.Errorf("got %v, %v", err, s.paths())
	}
}

func TestDescribeOutcomes(t *testing.T) {
	for _, c := range []struct {
		name string
		a    answer
		want Class
	}{
		{"compiling", answer{status: 200, body: `{"program_status":"CompilingRust","program_info":null}`}, ClassRetry},
		{"did not compile", answer{status: 200, body: `{"program_status":"SqlError","program_info":null}`}, ClassStopOperator},
		{"did not compile, older form", answer{status: 200, body: `{"program_status":{"SqlError":[]}}`}, ClassStopOperator},
		{"stopped", answer{status: 503, body: `{"error_code":"PipelineInteractionNotDeployed"}`}, ClassRetry},
		{"unknown pipeline", answer{status: 404, body: `{"error_code":"UnknownPipelineName"}`}, ClassStopOperator},
		{"key of a column that is none", answer{status: 200, body: `{"inputs":[{"name":"t","primary_key":["x"],"fields":[{"name":"a","columntype":{"type":"BIGINT","nullable":false}}]}]}`}, ClassRetry},
		{"an endless type", answer{status: 200, body: `{"inputs":[{"name":"t","fields":[{"name":"a","columntype":` +
			strings.Repeat(`{"type":"ARRAY","nullable":true,"component":`, 40) + `{"type":"BIGINT","nullable":true}` + strings.Repeat("}", 40) + `}]}]}`}, ClassRetry},
	} {
		t.Run(c.name, func(t *testing.T) {
			cl, _ := newScripted(t, Config{}, func(int, seen) answer { return c.a })
			if _, err := cl.Describe(t.Context()); err == nil || Classify(err) != c.want {
				t.Errorf("got %v (%s)", err, Classify(err))
			}
		})
	}
}

func FuzzSchema(f *testing.F) {
	f.Add([]byte(program))
	f.Fuzz(func(t *testing.T, body []byte) {
		c, _ := newScripted(t, Config{}, nil)
		s, err := c.parseSchema(body)
		if err != nil {
			return
		}
		for _, name := range s.Names() {
			table := s.tables[name]
			if len(table.Columns) == 0 {
				t.Fatal("a table without columns")
			}
			// Whether it can be written is open; that it is decided is not.
			_, _ = NewEncoder(table, table.Relation(), Policy{})
		}
	})
}
