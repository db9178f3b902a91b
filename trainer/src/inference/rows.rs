//! Parses the rows of a shard of lines or CSV.

use serde::de::DeserializeOwned;

/// A row, or the reason why it cannot be parsed.
pub(super) type Row<T> = Result<T, BadRow>;

/// Error of a row.
#[derive(Debug)]
pub(super) struct BadRow {
    pub(super) reason: String,
    /// Whether the file lacks a column, so all of its rows have the same error.
    pub(super) is_of_file: bool,
}

impl From<String> for BadRow {
    fn from(reason: String) -> Self {
        Self { reason, is_of_file: false }
    }
}

/// Returns the rows of a shard of JSON lines. `is_first`: the shard begins at the start of a file.
pub(super) fn lines<T: DeserializeOwned>(bytes: &[u8], mut is_first: bool) -> Vec<Row<T>> {
    let mut rows = vec![];
    for line in bytes.split(|byte| *byte == b'\n') {
        let is_start = std::mem::take(&mut is_first);
        if !is_blank(line, is_start) {
            rows.push(json(without_bom(line, is_start)));
        }
    }
    rows
}

/// Returns the rows of a shard of CSV with these columns.
pub(super) fn records<T: DeserializeOwned>(bytes: &[u8], columns: &[String]) -> Vec<Row<T>> {
    let mut reader = csv::ReaderBuilder::new().has_headers(false).flexible(true).from_reader(bytes);
    let header = csv::StringRecord::from(columns.to_vec());
    let (mut rows, mut record) = (vec![], csv::ByteRecord::new());
    // Reading byte records of any length from memory cannot fail.
    while reader.read_byte_record(&mut record).unwrap_or(false) {
        rows.push(fields(&record, &header));
    }
    rows
}

/// Returns `true` if a line contains no row. The first line may start with a byte order mark.
pub(super) fn is_blank(line: &[u8], is_first: bool) -> bool {
    without_bom(line, is_first).trim_ascii().is_empty()
}

fn without_bom(line: &[u8], is_first: bool) -> &[u8] {
    line.strip_prefix(b"\xef\xbb\xbf").filter(|_| is_first).unwrap_or(line)
}

fn json<T: DeserializeOwned>(line: &[u8]) -> Row<T> {
    let mut reader = serde_json::Deserializer::from_slice(line);
    let row = serde_path_to_error::deserialize(&mut reader);
    let row = row.map_err(|error| with_path(&error.path().to_string(), error.inner()))?;
    reader.end().map_err(|error| error.to_string())?;
    Ok(row)
}

fn fields<T: DeserializeOwned>(record: &csv::ByteRecord, header: &csv::StringRecord) -> Row<T> {
    if record.len() != header.len() {
        let (num, expected) = (record.len(), header.len());
        return Err(format!("the row has {num} columns, but the first line has {expected}").into());
    }
    let record = csv::StringRecord::from_byte_record(record.clone()).map_err(|error| {
        format!("not UTF-8 in {}", column(header, error.utf8_error().field() as u64))
    })?;
    record.deserialize(Some(header)).map_err(|error| match error.kind() {
        csv::ErrorKind::Deserialize { err, .. } => match err.field() {
            Some(field) => {
                let value = usize::try_from(field).ok().and_then(|field| record.get(field));
                let value = value.unwrap_or_default();
                format!("{}: {} (found {value:?})", column(header, field), err.kind()).into()
            }
            None => of_row(err.kind().to_string(), header),
        },
        _ => error.to_string().into(),
    })
}

/// Returns the error of a complete row.
fn of_row(reason: String, header: &csv::StringRecord) -> BadRow {
    let missing = reason.strip_prefix("missing field `").and_then(|rest| rest.strip_suffix('`'));
    match missing.filter(|missing| header.iter().all(|name| name != *missing)) {
        Some(missing) => {
            let names: Vec<&str> = header.iter().collect();
            let reason = format!("no column `{missing}`; the columns are {}", names.join(", "));
            BadRow { reason, is_of_file: true }
        }
        None => reason.into(),
    }
}

fn column(header: &csv::StringRecord, field: u64) -> String {
    let name = usize::try_from(field).ok().and_then(|field| header.get(field));
    format!("column {:?}", name.unwrap_or_default())
}

/// Returns `PATH: ERROR`; only the error if it concerns the complete row.
pub(super) fn with_path(path: &str, error: &dyn std::fmt::Display) -> String {
    if path == "." { error.to_string() } else { format!("{path}: {error}") }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;
    use stoker_api::inference::RowFormat;

    use super::*;

    #[derive(Debug, Deserialize, PartialEq)]
    struct Item {
        name: String,
        size: Option<f64>,
    }

    fn item(name: &str, size: Option<f64>) -> Result<Item, &'static str> {
        Ok(Item { name: name.into(), size })
    }

    fn check(format: RowFormat, text: &[u8], expected: &[Result<Item, &str>]) {
        let columns = ["name".to_owned(), "size".to_owned()];
        let rows: Vec<Row<Item>> = match format {
            RowFormat::Csv => records(text, &columns),
            _ => lines(text, true),
        };
        assert_eq!(rows.len(), expected.len(), "{rows:?}");
        for (row, expected) in rows.into_iter().zip(expected) {
            match (&row, expected) {
                (Ok(row), Ok(expected)) => assert_eq!(row, expected),
                (Err(why), Err(expected)) => {
                    assert!(why.reason.contains(expected) && !why.is_of_file, "{why:?}");
                }
                _ => panic!("{row:?} is not {expected:?}"),
            }
        }
    }

    #[test]
    fn json_lines_are_parsed_independently() {
        let text = "\u{feff}{\"name\": \"ä\", \"size\": 1.5}\r\n\n\
                    {\"name\": \"日\\n本\", \"size\": null}\n\
                    {\"name\": \"x\"}\n{\"name\": 1}\n{\"size\": 1}\n{\"name\": \"x\"} y\n[";
        let expected = [
            item("ä", Some(1.5)),
            item("日\n本", None),
            item("x", None),
            Err("name: invalid type: integer `1`"),
            Err("missing field `name`"),
            Err("trailing characters"),
            Err("EOF"),
        ];
        check(RowFormat::JsonLines, text.as_bytes(), &expected);
        check(RowFormat::JsonLines, b"", &[]);
        check(RowFormat::JsonLines, b"\"\xff\"\n", &[Err("invalid")]);
        check(RowFormat::JsonLines, b"{\"name\": \"\xff\"}\n", &[Err("invalid unicode")]);
    }

    #[test]
    fn csv_is_parsed_with_quotes_and_nulls() {
        let text = "a,1.5\r\n\"b, \"\"c\"\"\nd\",\nä,-2\n,3\nx,y\nx\nx,1,2\n";
        let expected = [
            item("a", Some(1.5)),
            item("b, \"c\"\nd", None),
            item("ä", Some(-2.0)),
            item("", Some(3.0)),
            Err("column \"size\": invalid float literal (found \"y\")"),
            Err("the row has 1 columns, but the first line has 2"),
            Err("the row has 3 columns"),
        ];
        check(RowFormat::Csv, text.as_bytes(), &expected);
        check(RowFormat::Csv, b"", &[]);
        check(
            RowFormat::Csv,
            b"a,1\n\xff,2\n",
            &[item("a", Some(1.0)), Err("not UTF-8 in column \"name\"")],
        );
    }

    #[test]
    fn missing_columns_are_errors_of_the_file() {
        let error = |columns: &[&str]| {
            let columns: Vec<String> = columns.iter().map(|name| (*name).to_owned()).collect();
            let text = vec!["1"; columns.len()].join(",") + "\n";
            records::<Item>(text.as_bytes(), &columns).remove(0)
        };
        let missing = error(&["nom", "size"]).unwrap_err();
        assert_eq!(missing.reason, "no column `name`; the columns are nom, size");
        assert!(missing.is_of_file);
        // A column without a value is optional.
        assert_eq!(error(&["name", "x"]).unwrap(), Item { name: "1".into(), size: None });
    }
}
