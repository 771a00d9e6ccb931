package main

import (
	"context"
	"errors"
	"fmt"
	"strconv"
	"sync"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/twmb/franz-go/pkg/kgo"
)

// traffic makes orders at both sources: the same ones in every run, so that two
// runs can be compared. It is used from one goroutine; only [traffic.made] is safe beside.
type traffic struct {
	conn   *pgx.Conn
	client *kgo.Client
	orders int64 // the last id in Postgres
	web    int64 // the last id in Kafka

	mu    sync.Mutex
	total volume
}

// volume counts what the sources have taken.
type volume struct{ transactions, rowChanges, records int64 }

func newTraffic(ctx context.Context, w *world) (*traffic, error) {
	conn, err := w.pg.Connect(ctx)
	if err != nil {
		return nil, err
	}
	client, err := w.broker.Client(kgo.RecordPartitioner(kgo.ManualPartitioner()))
	if err != nil {
		return nil, errors.Join(err, conn.Close(context.WithoutCancel(ctx)))
	}
	return &traffic{conn: conn, client: client}, nil
}

// close gives the connections back. One that a cancelled statement has closed is
// no error.
func (t *traffic) close(ctx context.Context) error {
	t.client.Close()
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	return t.conn.Close(ctx)
}

func (t *traffic) made() volume {
	t.mu.Lock()
	defer t.mu.Unlock()
	return t.total
}

func (t *traffic) count(m volume) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.total.transactions += m.transactions
	t.total.rowChanges += m.rowChanges
	t.total.records += m.records
}

var customers = []string{"Ada", "Grace", "Edsger", "Barbara", "Tony", "Zoë \"Z\""}

// placed is the time of an order: a second apart, with odd microseconds.
func placed(id int64) time.Time {
	return time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC).Add(time.Duration(id)*time.Second + time.Duration(id*7919%1e6)*time.Microsecond)
}

// transaction commits one more order with its items in Postgres; every fourth
// pays an older order, every seventh takes one away with its items.
func (t *traffic) transaction(ctx context.Context) error {
	t.orders++
	id := t.orders
	changed := int64(0)
	err := pgx.BeginFunc(ctx, t.conn, func(tx pgx.Tx) error {
		do := func(sql string, args ...any) error {
			tag, err := tx.Exec(ctx, sql, args...)
			changed += tag.RowsAffected()
			return err
		}
		var note *string // NULL for every second order
		if id%2 == 0 {
			text := fmt.Sprintf("order %d\nsecond line", id)
			note = &text
		}
		errs := []error{do(`INSERT INTO orders VALUES ($1, $2, ($3::bigint) / 100.0, 'new', $4, $5)`,
			id, customers[id%int64(len(customers))], id*1234%99999, note, placed(id))}
		for line := range 1 + id%3 {
			errs = append(errs, do(`INSERT INTO order_items VALUES ($1, $2, $3, $4, ($5::bigint) / 100.0)`,
				id, line+1, "sku-"+strconv.FormatInt(id*31%97, 10), 1+line, 100*line+id%100))
		}
		if id%4 == 3 {
			errs = append(errs, do(`UPDATE orders SET status = 'paid' WHERE id = $1`, id-2))
		}
		if id%7 == 6 {
			errs = append(errs, do(`DELETE FROM order_items WHERE order_id = $1`, id-5), do(`DELETE FROM orders WHERE id = $1`, id-5))
		}
		return errors.Join(errs...)
	})
	if err != nil {
		return fmt.Errorf("commit order %d in Postgres: %w", id, err)
	}
	t.count(volume{transactions: 1, rowChanges: changed})
	return nil
}

// webOrder is the value of a record of the topic.
type webOrder struct {
	ID       int64   `json:"id"`
	Customer string  `json:"customer"`
	Amount   string  `json:"amount"`
	Status   string  `json:"status"`
	Note     *string `json:"note"`
	Placed   string  `json:"placed"`
}

// records writes n more orders into the topic, each to the partition of its id;
// every fifth is followed by a new version of an older order, every ninth by the
// end of one (a record without a value).
func (t *traffic) records(ctx context.Context, n int) error {
	var batch []*kgo.Record
	add := func(id int64, value []byte) {
		batch = append(batch, &kgo.Record{
			Topic: topic, Partition: int32(id % partitions), Key: []byte(strconv.FormatInt(id, 10)), Value: value,
		})
	}
	for range n {
		t.web++
		id := t.web
		value, err := orderJSON(id, "new")
		if err != nil {
			return err
		}
		add(id, value)
		if id%5 == 4 {
			if value, err = orderJSON(id-3, "shipped"); err != nil {
				return err
			}
			add(id-3, value)
		}
		if id%9 == 8 {
			add(id-6, nil)
		}
	}
	if err := t.client.ProduceSync(ctx, batch...).FirstErr(); err != nil {
		return fmt.Errorf("produce %d records: %w", len(batch), err)
	}
	t.count(volume{records: int64(len(batch))})
	return nil
}
