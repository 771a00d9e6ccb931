package felderasim_test

import (
	"context"
	"fmt"
	"net/http"
	"strings"

	"holdfast/test/felderasim"
)

// A simulator, one row, and what became of it.
func Example() {
	ctx := context.Background()
	sim, err := felderasim.New(felderasim.Options{
		SQL: `CREATE TABLE orders (id BIGINT NOT NULL PRIMARY KEY, qty INT) WITH ('materialized' = 'true');`,
	})
	if err != nil {
		panic(err)
	}
	if err := sim.Start(ctx); err != nil {
		panic(err)
	}
	url := sim.URL() + "/v0/pipelines/p/ingress/orders?format=json&update_format=insert_delete&array=true"
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, url, strings.NewReader(`[{"insert":{"id":1,"qty":2}}]`))
	if err != nil {
		panic(err)
	}
	tr := &http.Transport{DisableKeepAlives: true}
	resp, err := tr.RoundTrip(req)
	if err != nil {
		panic(err)
	}
	_ = resp.Body.Close()
	err = sim.WaitFor(ctx, func(v felderasim.View) bool { return v.Stats().Global.PipelineComplete })
	fmt.Println(resp.StatusCode, sim.Dump("orders"), err, sim.Close())
	// Output: 200 [{"id":1,"qty":2}] <nil> <nil>
}
