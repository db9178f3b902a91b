//! Numeric tables in CSV files, with an optional column of class names.
//!
//! # Examples
//!
//! ```
//! use stoker_trainer::datasets::csv::{self, Column};
//!
//! let text = "width,height,kind\n1,2,oak\n3,4,ash\n";
//! let table = csv::Options::new().label("kind").parse("trees.csv", text.as_bytes())?;
//! assert_eq!(table.features, [[1.0, 2.0], [3.0, 4.0]].concat());
//! assert_eq!((table.labels, table.classes), (vec![1, 0], vec!["ash".into(), "oak".into()]));
//! # Ok::<(), stoker_trainer::datasets::DataError>(())
//! ```

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read;
use std::path::Path;

use super::{DataError, read};

/// A column, by name in the header or by index from 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Column {
    /// Name of the column in the header.
    Name(String),
    /// Index of the column, from 0.
    Index(usize),
}

impl From<&str> for Column {
    fn from(name: &str) -> Self {
        Self::Name(name.into())
    }
}

impl From<usize> for Column {
    fn from(index: usize) -> Self {
        Self::Index(index)
    }
}

/// Options for reading a file. By default, the file has a header and commas, all columns except the
/// label are features, and there is no label.
#[derive(Clone, Debug)]
pub struct Options {
    has_header: bool,
    delimiter: u8,
    features: Option<Vec<Column>>,
    label: Option<Column>,
    classes: Option<Vec<String>>,
}

/// Contents of a file.
#[derive(Clone, Debug, PartialEq)]
pub struct Table {
    /// Values of the feature columns, row by row: `[rows, names.len()]`.
    pub features: Vec<f32>,
    /// Class of each row, as an index into `classes`; empty without a label column.
    pub labels: Vec<usize>,
    /// Distinct texts of the label column: in numeric order if all are integers, otherwise in byte
    /// order. A file that lacks a class numbers the others differently, so pass the classes of the
    /// training file to [`Options::classes`] for all other files.
    pub classes: Vec<String>,
    /// Names of the feature columns; their indices if there is no header.
    pub names: Vec<String>,
    /// Number of rows.
    pub rows: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self::new()
    }
}

impl Options {
    /// Creates the default options: a header, commas, and all columns as features.
    pub fn new() -> Self {
        Self { has_header: true, delimiter: b',', features: None, label: None, classes: None }
    }

    /// Treats the first line as data.
    #[must_use]
    pub fn no_header(self) -> Self {
        Self { has_header: false, ..self }
    }

    /// Sets the column separator (default: comma).
    #[must_use]
    pub fn delimiter(self, delimiter: u8) -> Self {
        Self { delimiter, ..self }
    }

    /// Restricts the features to these columns, in this order.
    #[must_use]
    pub fn features<C: Into<Column>>(self, columns: impl IntoIterator<Item = C>) -> Self {
        Self { features: Some(columns.into_iter().map(Into::into).collect()), ..self }
    }

    /// Sets the column of class names.
    #[must_use]
    pub fn label(self, column: impl Into<Column>) -> Self {
        Self { label: Some(column.into()), ..self }
    }

    /// Sets the classes, in the order of their numbers (default: the distinct texts of the label
    /// column). Pass the classes of the training file when reading the validation file, so that
    /// both have the same numbers.
    #[must_use]
    pub fn classes<C: Into<String>>(self, classes: impl IntoIterator<Item = C>) -> Self {
        Self { classes: Some(classes.into_iter().map(Into::into).collect()), ..self }
    }

    /// Reads a file, plain or gzip.
    ///
    /// # Errors
    ///
    /// Fails if the file cannot be read, has no rows or lacks a column. Also fails if a row has
    /// another number of columns than the first, a label that is empty or not in
    /// [`classes`](Self::classes), a quote that is not closed, or a feature that is not a finite
    /// number.
    pub fn read(&self, path: impl AsRef<Path>) -> Result<Table, DataError> {
        let path = path.as_ref();
        self.parse(&path.display().to_string(), read::open(path)?)
    }

    /// Parses text; `file` is its name in error messages.
    ///
    /// # Errors
    ///
    /// Same as [`read`](Self::read).
    pub fn parse(&self, file: &str, mut text: impl Read) -> Result<Table, DataError> {
        let mut bytes = vec![];
        text.read_to_end(&mut bytes).map_err(|source| DataError::read(file, source))?;
        let mut reader = ::csv::ReaderBuilder::new()
            .has_headers(self.has_header)
            .delimiter(self.delimiter)
            .trim(::csv::Trim::All)
            .from_reader(bytes.as_slice());
        if self.has_header {
            let names = reader.headers().map_err(|error| read_error(file, error))?;
            let names = names.iter().map(Into::into).collect();
            return self.table(file, &bytes, names, reader.into_records());
        }
        let mut first = ::csv::StringRecord::new();
        let is_row = reader.read_record(&mut first).map_err(|error| read_error(file, error))?;
        let names = (0..first.len()).map(|index| index.to_string()).collect();
        let first = is_row.then_some(Ok(first));
        self.table(file, &bytes, names, first.into_iter().chain(reader.into_records()))
    }

    fn table(
        &self,
        file: &str,
        text: &[u8],
        names: Vec<String>,
        records: impl Iterator<Item = ::csv::Result<::csv::StringRecord>>,
    ) -> Result<Table, DataError> {
        let find = |column: &Column| self.find(file, &names, column);
        let label = self.label.as_ref().map(find).transpose()?;
        let features: Vec<usize> = match &self.features {
            Some(columns) => columns.iter().map(find).collect::<Result<_, _>>()?,
            None => (0..names.len()).filter(|index| Some(*index) != label).collect(),
        };
        let (mut values, mut texts, mut rows) = (Vec::new(), Vec::new(), 0);
        let mut last = ::csv::Position::new();
        for record in records {
            let record = record.map_err(|error| read_error(file, error))?;
            if let Some(position) = record.position() {
                last = position.clone();
            }
            let line = last.line();
            let position = |index: usize| format!(", line {line}, column {:?}", names[index]);
            for &index in &features {
                values.push(number(file, || position(index), &record[index])?);
            }
            if let Some(index) = label {
                self.check_label(file, || position(index), &record[index])?;
                texts.push(record[index].to_owned());
            }
            rows += 1;
        }
        let start = usize::try_from(last.byte()).unwrap_or(usize::MAX);
        if ends_in_quotes(text.get(start..).unwrap_or_default(), self.delimiter) {
            let position = format!(", line {}", last.line());
            let found = "the end of the file within quotes".into();
            return Err(malformed(file, position, "a closing quote".into(), found));
        }
        if rows == 0 {
            return Err(malformed(file, String::new(), "at least one row".into(), "none".into()));
        }
        let classes = self.classes.clone().unwrap_or_else(|| classes(&texts));
        let numbers: BTreeMap<&String, usize> =
            classes.iter().enumerate().map(|(number, class)| (class, number)).collect();
        let labels = texts.iter().filter_map(|text| numbers.get(text).copied()).collect();
        let names = features.iter().map(|index| names[*index].clone()).collect();
        Ok(Table { features: values, labels, classes, names, rows })
    }

    fn check_label(
        &self,
        file: &str,
        position: impl Fn() -> String,
        text: &str,
    ) -> Result<(), DataError> {
        let (expected, found) = match &self.classes {
            _ if text.is_empty() => ("a label".into(), "nothing".into()),
            Some(classes) if classes.iter().all(|class| class != text) => {
                (format!("a class of {}", classes.join(", ")), format!("{text:?}"))
            }
            _ => return Ok(()),
        };
        Err(malformed(file, position(), expected, found))
    }

    fn find(&self, file: &str, names: &[String], column: &Column) -> Result<usize, DataError> {
        let (index, expected) = match column {
            Column::Name(name) => {
                (names.iter().position(|other| other == name), format!("a column {name:?}"))
            }
            Column::Index(index) => (
                (*index < names.len()).then_some(*index),
                format!("a column with index {index} (the first has 0)"),
            ),
        };
        let has = || match self.has_header {
            true => format!("the columns {}", names.join(", ")),
            false => format!("{} columns and no header", names.len()),
        };
        index.ok_or_else(|| malformed(file, String::new(), expected, has()))
    }
}

fn number(file: &str, position: impl Fn() -> String, text: &str) -> Result<f32, DataError> {
    match text.parse::<f32>() {
        Ok(value) if value.is_finite() => Ok(value),
        _ => Err(malformed(file, position(), "a finite number".into(), format!("{text:?}"))),
    }
}

/// Returns the distinct texts: in numeric order if all are integers, otherwise in byte order.
fn classes(texts: &[String]) -> Vec<String> {
    let classes: BTreeSet<&String> = texts.iter().collect();
    let mut classes: Vec<String> = classes.into_iter().cloned().collect();
    if classes.iter().all(|class| class.parse::<i64>().is_ok()) {
        classes.sort_by_key(|class| class.parse::<i64>().unwrap_or_default());
    }
    classes
}

/// Returns whether the text ends within a quoted field. The parser then returns all lines since the
/// quote as one field.
pub(crate) fn ends_in_quotes(text: &[u8], delimiter: u8) -> bool {
    let count = |text: &[u8]| {
        let reader = ::csv::ReaderBuilder::new()
            .has_headers(false)
            .flexible(true)
            .delimiter(delimiter)
            .from_reader(text);
        reader.into_byte_records().count()
    };
    // Within quotes, another row is part of the field too.
    count(text) == count(&[text, b"\nx\n"].concat())
}

fn read_error(file: &str, error: ::csv::Error) -> DataError {
    let line = error.position().map(|at| format!(", line {}", at.line())).unwrap_or_default();
    match error.into_kind() {
        ::csv::ErrorKind::Io(source) => DataError::read(file, source),
        ::csv::ErrorKind::UnequalLengths { expected_len, len, .. } => {
            malformed(file, line, format!("{expected_len} columns"), len.to_string())
        }
        ::csv::ErrorKind::Utf8 { err, .. } => {
            malformed(file, line, "text in UTF-8".into(), err.to_string())
        }
        other => malformed(file, line, "a table".into(), format!("{other:?}")),
    }
}

fn malformed(file: &str, position: String, expected: String, found: String) -> DataError {
    let remedy = "correct the file or select other columns";
    DataError::Malformed { file: file.into(), position, expected, found, remedy }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TREES: &str = "width, height,kind\n1,2.5,oak\n-3e1,4,ash\n5,6,oak\n";

    /// Expected features, labels and classes, or the error.
    type Expected<'a> = Result<(&'a [f32], &'a [usize], &'a [&'a str]), &'a str>;

    fn check(options: Options, text: &str, expected: Expected) {
        match (options.parse("trees.csv", text.as_bytes()), expected) {
            (Ok(table), Ok((features, labels, classes))) => {
                assert_eq!((&table.features[..], &table.labels[..]), (features, labels));
                assert_eq!(table.classes, classes);
                assert_eq!(table.rows * table.names.len(), table.features.len());
            }
            (Err(error), Err(expected)) => assert_eq!(
                error.to_string(),
                format!("trees.csv{expected}; correct the file or select other columns")
            ),
            (got, expected) => panic!("{got:?} is not {expected:?}"),
        }
    }

    #[test]
    fn columns_are_selected_by_name_or_index() {
        let all = [1.0, 2.5, -30.0, 4.0, 5.0, 6.0];
        let classes = ["ash", "oak"];
        check(Options::new().label("kind"), TREES, Ok((&all, &[1, 0, 1], &classes)));
        check(Options::new().label(2), TREES, Ok((&all, &[1, 0, 1], &classes)));
        let height = [2.5, 4.0, 6.0];
        check(Options::new().features(["height"]), TREES, Ok((&height, &[], &[])));
        let both = [2.5, 1.0, 4.0, -30.0, 6.0, 5.0];
        check(Options::new().features([1, 0]).label(2), TREES, Ok((&both, &[1, 0, 1], &classes)));
    }

    /// The file has no `ash`, so its other classes would have other numbers.
    #[test]
    fn given_classes_number_the_labels() {
        let text = "width,kind\n1,pine\n2,oak\n";
        let of = |classes: [&str; 3]| Options::new().label("kind").classes(classes);
        let classes = ["ash", "oak", "pine"];
        check(of(classes), text, Ok((&[1.0, 2.0], &[2, 1], &classes)));
        let unknown =
            ", line 2, column \"kind\": expected a class of ash, oak, elm, found \"pine\"";
        check(of(["ash", "oak", "elm"]), text, Err(unknown));
    }

    #[test]
    fn first_line_is_data_without_a_header() {
        let options = Options::new().no_header().delimiter(b';').label(0);
        check(options, "10;1\n9;2\n10;3\n", Ok((&[1.0, 2.0, 3.0], &[1, 0, 1], &["9", "10"])));
    }

    #[test]
    fn errors_name_line_and_column() {
        let label = || Options::new().label("kind");
        let missing = ": expected a column \"kind\", found the columns a, b";
        check(label(), "a,b\n1,2\n", Err(missing));
        let index =
            ": expected a column with index 2 (the first has 0), found 2 columns and no header";
        check(Options::new().no_header().features([2]), "1,2\n", Err(index));
        let word = ", line 3, column \"a\": expected a finite number, found \"x\"";
        check(label(), "a,kind\n1,p\nx,q\n", Err(word));
        let nan = ", line 2, column \"a\": expected a finite number, found \"NaN\"";
        check(label(), "a,kind\nNaN,p\n", Err(nan));
        let empty = ", line 1, column \"0\": expected a finite number, found \"\"";
        check(Options::new().no_header(), ",1\n", Err(empty));
        check(
            label(),
            "a,kind\n1,\n",
            Err(", line 2, column \"kind\": expected a label, found nothing"),
        );
        check(label(), "a,kind\n1,p,3\n", Err(", line 2: expected 2 columns, found 3"));
        let open = ", line 3: expected a closing quote, found the end of the file within quotes";
        check(label(), "a,kind\n1,p\n2,\"q\n3,p\n", Err(open));
        check(label(), "a,kind\n", Err(": expected at least one row, found none"));
        check(Options::new().no_header(), "", Err(": expected at least one row, found none"));
    }
}
