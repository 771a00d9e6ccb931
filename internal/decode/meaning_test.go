package decode

import (
	"testing"
	"time"

	"pgregory.net/rapid"
)

// The calendar is compared with the standard library's.
func TestTemporalTexts(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		var s scratch
		s.reset(0, 1)
		write := func(m meaning, n int64) string {
			w := s.begin()
			m.writeInt(&w, n)
			v, err := w.value(Text)
			if err != nil {
				t.Fatal(err)
			}
			return string(v.Bytes)
		}
		days := rapid.Int64Range(-719_162, 2_932_896).Draw(t, "days") // the years 1 to 9999
		if got, want := write(meansDate, days), time.Unix(days*86_400, 0).UTC().Format(time.DateOnly); got != want {
			t.Fatalf("day %d is %s, want %s", days, got, want)
		}
		micros := days*86_400_000_000 + rapid.Int64Range(0, 86_400_000_000-1).Draw(t, "micros")
		at := time.UnixMicro(micros).UTC()
		layout := "2006-01-02T15:04:05.000000"
		if at.Nanosecond() == 0 {
			layout = "2006-01-02T15:04:05"
		}
		if got, want := write(meansLocalMicros, micros), at.Format(layout); got != want {
			t.Fatalf("%d is %s, want %s", micros, got, want)
		}
		if got, want := write(meansInstantMicros, micros), at.Format(layout)+"Z"; got != want {
			t.Fatalf("%d is %s, want %s", micros, got, want)
		}
	})
}
