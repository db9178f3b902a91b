//! Rows as JSON lines, and values as CSV.

use std::borrow::Cow;
use std::fmt::Write as _;

use serde::Serialize;
use stoker_api::number;
use stoker_storage::metrics::Row;

use crate::failure::Failure;

/// First line of the CSV output.
pub(super) const CSV_HEADER: &str = "trial,group,batches,epoch,attempt,time,metric,value";

/// A row as in the files, with its trial.
#[derive(Serialize)]
struct TrialRow<'a> {
    trial: u32,
    #[serde(flatten)]
    row: &'a Row,
}

/// Returns one JSON object per row and line.
pub(super) fn json_lines(trial: u32, rows: &[Row]) -> Result<String, Failure> {
    let mut text = String::new();
    for row in rows {
        let line = serde_json::to_string(&TrialRow { trial, row })
            .map_err(|error| Failure::System(format!("cannot serialize a row: {error}")))?;
        text.push_str(&line);
        text.push('\n');
    }
    Ok(text)
}

/// Returns one line per value, without the header.
pub(super) fn csv(trial: u32, rows: &[Row]) -> String {
    let mut text = String::new();
    for row in rows {
        let Row { group, batches, epoch, attempt, time, metrics } = row;
        let group = csv_cell(group);
        let time = time.map(number::format).unwrap_or_default();
        for (name, value) in metrics {
            let (name, value) = (csv_cell(name), number::format(*value));
            let cells = format_args!("{batches},{epoch},{attempt},{time},{name},{value}");
            // Ignore the result: writing to a string cannot fail.
            let _ = writeln!(text, "{trial},{group},{cells}");
        }
    }
    text
}

/// Quotes a text as RFC 4180 defines, if necessary.
fn csv_cell(text: &str) -> Cow<'_, str> {
    match text.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")).into(),
        false => text.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(time: Option<f64>, metrics: &[(&str, f64)]) -> Row {
        let metrics = metrics.iter().map(|(name, value)| ((*name).to_owned(), *value)).collect();
        Row { group: "training".to_owned(), batches: 20, epoch: 1, attempt: 2, time, metrics }
    }

    #[test]
    fn rows_become_json_lines() {
        let rows = [row(Some(1.5), &[("a", 0.1), ("b", f64::INFINITY)]), row(None, &[("a", 1.0)])];
        let begin = r#"{"trial":3,"group":"training","batches":20,"epoch":1,"attempt":2"#;
        let first = format!(
            r#"{begin},"time":1.5,"metrics":{{"a":0.1,"b":null}},"nonfinite":{{"b":"inf"}}}}"#
        );
        let second = format!(r#"{begin},"metrics":{{"a":1.0}}}}"#);
        assert_eq!(json_lines(3, &rows).unwrap(), format!("{first}\n{second}\n"));
    }

    #[test]
    fn values_become_csv_lines() {
        let check = |row: Row, expected: &str| assert_eq!(csv(3, &[row]), expected);
        check(
            row(Some(1.5), &[("a", 0.1), ("b", f64::NAN)]),
            "3,training,20,1,2,1.5,a,0.1\n3,training,20,1,2,1.5,b,NaN\n",
        );
        check(
            row(None, &[("x \"y\", z", -1e300)]),
            "3,training,20,1,2,,\"x \"\"y\"\", z\",-1e300\n",
        );
        assert_eq!(CSV_HEADER.split(',').count(), 8);
    }
}
