//! Updates of a list.

use std::collections::BTreeMap;
use std::time::Duration;

use serde_json::Value;

use super::List;
use crate::failure::Failure;
use crate::print::{self, Format};

/// Interval between two reads of the list. Each read transfers all objects.
const INTERVAL: Duration = Duration::from_secs(2);
/// Maximum number of consecutive failed reads.
const FAILURES_MAX: u32 = 60;

/// Prints the list, then the rows that are new or have changed, until the reader closes the pipe.
///
/// # Errors
///
/// The first read failed, or many in a row.
pub(super) async fn watch(
    format: Format,
    read: impl AsyncFn() -> Result<List, Failure>,
) -> Result<(), Failure> {
    let mut printer = Printer::new(format);
    let mut num_failures = 0;
    let mut is_first = true;
    loop {
        match read().await {
            Ok(list) => {
                if is_first && list.rows.is_empty() {
                    print::err(&list.empty);
                }
                (is_first, num_failures) = (false, 0);
                for line in printer.update(&list)? {
                    if !print::try_out(line) {
                        return Ok(());
                    }
                }
            }
            Err(error) if is_first || num_failures >= FAILURES_MAX => return Err(error),
            Err(error) => {
                if num_failures == 0 {
                    print::err(format!("stoker: {error}; retrying"));
                }
                num_failures += 1;
            }
        }
        tokio::time::sleep(INTERVAL).await;
    }
}

/// Rows that were printed.
#[derive(Debug)]
struct Printer {
    format: Format,
    /// Phase and value of each printed row, by namespace and name.
    printed: BTreeMap<(String, String), (String, Value)>,
    header: Vec<String>,
    /// Widths of the columns. They only grow, so that the table stays aligned.
    widths: Vec<usize>,
}

impl Printer {
    fn new(format: Format) -> Self {
        Self { format, printed: BTreeMap::new(), header: vec![], widths: vec![] }
    }

    /// Returns the lines to print: the header if it has changed, and new or changed rows. The age
    /// of an object is no change.
    fn update(&mut self, list: &List) -> Result<Vec<String>, Failure> {
        let mut changed = Vec::new();
        for row in &list.rows {
            let namespace = row.value["metadata"]["namespace"].as_str().unwrap_or_default();
            let key = (namespace.to_owned(), row.name.clone());
            let state = (row.phase.clone(), row.value.clone());
            if self.printed.get(&key) != Some(&state) {
                self.printed.insert(key, state);
                changed.push(row);
            }
        }
        match self.format {
            Format::Json => Ok(changed.iter().map(|row| row.value.to_string()).collect()),
            Format::Name => Ok(changed.iter().map(|row| row.name.clone()).collect()),
            Format::Yaml => {
                let yaml = |row: &&super::Row| Ok(format!("---\n{}", print::yaml(&row.value)?));
                changed.iter().map(yaml).collect()
            }
            Format::Text | Format::Wide | Format::Csv | Format::Parquet => {
                let mut rows: Vec<Vec<String>> =
                    changed.iter().map(|row| list.texts(row, self.format)).collect();
                let header = list.header(self.format);
                if header != self.header && !rows.is_empty() {
                    rows.insert(0, header.clone());
                    self.header = header;
                }
                print::widen(&mut self.widths, rows.iter());
                Ok(rows.iter().map(|row| print::padded(row, &self.widths)).collect())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::super::{Cell, Column, Row};
    use super::*;

    fn list(rows: &[(&str, &str, &str)]) -> List {
        let row = |(name, phase, age): &(&str, &str, &str)| Row {
            name: (*name).to_owned(),
            phase: (*phase).to_owned(),
            cells: [name, phase, age].map(|text| Cell::text(*text)).to_vec(),
            value: json!({ "name": name, "phase": phase }),
            ..Row::default()
        };
        let columns = ["name", "phase", "age"].map(Column::new).to_vec();
        List { columns, rows: rows.iter().map(row).collect(), empty: String::new(), noun: "trial" }
    }

    #[test]
    fn only_new_and_changed_rows_are_printed() {
        let mut printer = Printer::new(Format::Text);
        let mut check = |rows: &[(&str, &str, &str)], expected: &[&str]| {
            assert_eq!(printer.update(&list(rows)).unwrap(), expected, "{rows:?}");
        };
        check(&[], &[]);
        check(&[("a", "Pending", "1s")], &["NAME  PHASE    AGE", "a     Pending  1s"]);
        check(&[("a", "Pending", "2s")], &[]);
        check(
            &[("a", "Running", "3s"), ("b", "Pending", "1s")],
            &["a     Running  3s", "b     Pending  1s"],
        );
        check(&[("b", "Pending", "2s")], &[]);
    }

    #[test]
    fn equal_names_in_two_namespaces_are_two_rows() {
        let mut printer = Printer::new(Format::Name);
        let mut list = list(&[("a", "Pending", ""), ("a", "Running", "")]);
        list.rows[1].value["metadata"] = json!({ "namespace": "other" });
        assert_eq!(printer.update(&list).unwrap(), ["a", "a"]);
        assert!(printer.update(&list).unwrap().is_empty());
    }

    #[test]
    fn json_values_are_printed_one_per_line() {
        let mut printer = Printer::new(Format::Json);
        let lines = printer.update(&list(&[("a", "Pending", ""), ("b", "Pending", "")])).unwrap();
        assert_eq!(lines[0], r#"{"name":"a","phase":"Pending"}"#);
        assert_eq!(lines.len(), 2);
        let lines = printer.update(&list(&[("a", "Pending", ""), ("b", "Failed", "")])).unwrap();
        assert_eq!(lines, [r#"{"name":"b","phase":"Failed"}"#]);
    }
}
