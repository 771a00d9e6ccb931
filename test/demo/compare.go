package main

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"math/big"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/twmb/franz-go/pkg/kgo"
)

// pgTime is the form in which both sides' timestamps are compared.
const pgTime = "2006-01-02 15:04:05.000000"

func orderJSON(id int64, status string) ([]byte, error) {
	o := webOrder{
		ID: id, Customer: customers[id%int64(len(customers))], Status: status,
		Amount: fmt.Sprintf("%d.%02d", id*77%1000, id%100), Placed: placed(id).Format(pgTime),
	}
	if id%3 == 0 {
		text := "from the web, №" + strconv.FormatInt(id, 10)
		o.Note = &text
	}
	value, err := json.Marshal(o)
	if err != nil {
		return nil, fmt.Errorf("write web order %d: %w", id, err)
	}
	return value, nil
}

// compare reads every table from its source and from Feldera, and gives an error
// when a row is on one side only or differs. It prints the counts.
func (w *world) compare(ctx context.Context) error {
	orders, err := w.pg.Rows(ctx, `SELECT id, customer, amount, status, note, to_char(placed, 'YYYY-MM-DD HH24:MI:SS.US') FROM orders`)
	if err != nil {
		return err
	}
	items, err := w.pg.Rows(ctx, `SELECT order_id, line, sku, quantity, price FROM order_items`)
	if err != nil {
		return err
	}
	web, err := w.topicRows(ctx)
	if err != nil {
		return err
	}
	unequal := 0
	for _, c := range []struct {
		source, table string
		want          [][]string
		columns       []string
	}{
		{"Postgres orders", "orders", orders, []string{"id", "customer", "amount", "status", "note", "placed"}},
		{"Postgres order_items", "order_items", items, []string{"order_id", "line", "sku", "quantity", "price"}},
		{"Kafka topic " + topic, "web_orders", web, []string{"id", "customer", "amount", "status", "note", "placed"}},
	} {
		missing, surplus := difference(c.want, w.felderaRows(c.table, c.columns))
		verdict := "EQUAL row by row"
		if len(missing)+len(surplus) > 0 {
			unequal++
			verdict = fmt.Sprintf("NOT EQUAL: %d rows only at the source, %d only in Feldera%s%s", len(missing), len(surplus),
				examples("only at the source", missing), examples("only in Feldera", surplus))
		}
		w.say.line("compare", "%-21s %4d rows, Feldera %-11s %4d rows: %s", c.source, len(c.want), c.table, w.sim.Count(c.table), verdict)
	}
	if unequal > 0 {
		return fmt.Errorf("source and destination differ in %d of 3 tables", unequal)
	}
	return nil
}

func examples(where string, rows []string) string {
	text := ""
	for _, row := range rows[:min(len(rows), 3)] {
		text += fmt.Sprintf("\n  %s: %s", where, row)
	}
	return text
}

// felderaRows gives a table of the destination in the texts of the source.
func (w *world) felderaRows(table string, columns []string) [][]string {
	var rows [][]string
	for _, row := range w.sim.Rows(table) {
		texts := make([]string, len(columns))
		for i, c := range columns {
			texts[i] = cellText(c, row[c])
		}
		rows = append(rows, texts)
	}
	return rows
}

// cellText gives one text for all that mean the same value of that column.
func cellText(column string, v any) string {
	if v == nil {
		return "NULL"
	}
	text := fmt.Sprint(v)
	switch column {
	case "amount", "price":
		if n, ok := new(big.Rat).SetString(text); ok {
			return n.FloatString(2)
		}
	case "placed":
		for _, layout := range []string{time.DateTime, "2006-01-02T15:04:05"} { // a fraction is read after both
			if at, err := time.Parse(layout, strings.TrimSuffix(text, "Z")); err == nil {
				return at.Format(pgTime)
			}
		}
	}
	return text
}

// topicRows reads the whole topic from the broker and gives the rows that it
// means: of each key the last record, unless that has no value.
func (w *world) topicRows(ctx context.Context) ([][]string, error) {
	ctx, cancel := context.WithTimeout(ctx, 20*time.Second)
	defer cancel()
	ends, err := w.broker.EndOffsets(ctx, topic)
	if err != nil {
		return nil, err
	}
	from := map[int32]kgo.Offset{}
	for p, end := range ends {
		if end > 0 {
			from[p] = kgo.NewOffset().AtStart()
		}
	}
	client, err := w.broker.Client(kgo.ConsumePartitions(map[string]map[int32]kgo.Offset{topic: from}))
	if err != nil {
		return nil, err
	}
	defer client.Close()
	byKey := map[string][]string{}
	for len(from) > 0 {
		fetches := client.PollFetches(ctx)
		if err := fetches.Err(); err != nil {
			return nil, fmt.Errorf("read topic %s: %w", topic, err)
		}
		for it := fetches.RecordIter(); !it.Done(); {
			rec := it.Next()
			if rec.Offset+1 >= ends[rec.Partition] {
				delete(from, rec.Partition)
			}
			if rec.Value == nil {
				delete(byKey, string(rec.Key))
				continue
			}
			var o webOrder
			if err := json.Unmarshal(rec.Value, &o); err != nil {
				return nil, fmt.Errorf("read %s[%d] offset %d: %w", topic, rec.Partition, rec.Offset, err)
			}
			note := "NULL"
			if o.Note != nil {
				note = *o.Note
			}
			byKey[string(rec.Key)] = []string{strconv.FormatInt(o.ID, 10), o.Customer, o.Amount, o.Status, note, o.Placed}
		}
	}
	return slices.Collect(maps.Values(byKey)), nil
}

// difference gives the rows that are more often in a than in b, and the other
// way round, as texts in order.
func difference(a, b [][]string) (onlyA, onlyB []string) {
	count := map[string]int{}
	for _, row := range a {
		count[fmt.Sprintf("%q", row)]++
	}
	for _, row := range b {
		count[fmt.Sprintf("%q", row)]--
	}
	for _, row := range slices.Sorted(maps.Keys(count)) {
		for range count[row] {
			onlyA = append(onlyA, row)
		}
		for range -count[row] {
			onlyB = append(onlyB, row)
		}
	}
	return onlyA, onlyB
}
