//! Serialization of outputs to parts.

use serde::Serialize;
use stoker_api::inference::{InferenceOutput, RowFormat};

use super::field_names::{field_names, has_fields};
use crate::{InvalidInput, Result};

/// Output of one shard, row by row.
pub(super) enum PartWriter {
    Lines(Vec<u8>),
    /// CSV writer, and the names in the header, which the first row writes.
    Csv(Box<csv::Writer<Vec<u8>>>, Option<Vec<&'static str>>),
    #[cfg(feature = "parquet")]
    Table(super::table::Table),
}

impl PartWriter {
    /// Creates an empty part.
    ///
    /// # Errors
    ///
    /// Fails if this program does not support the format.
    pub(super) fn new(output: &InferenceOutput) -> Result<Self> {
        if cfg!(feature = "parquet") && output.format.is_typed() && output.columns.is_empty() {
            let why = "output.columns is empty; the format requires names and types of all columns";
            return Err(InvalidInput(why.into()).into());
        }
        match output.format {
            RowFormat::JsonLines => Ok(Self::Lines(vec![])),
            RowFormat::Csv => Ok(Self::Csv(Box::new(csv::Writer::from_writer(vec![])), None)),
            #[cfg(feature = "parquet")]
            typed => Ok(Self::Table(super::table::Table::new(typed, &output.columns))),
            #[cfg(not(feature = "parquet"))]
            typed => Err(super::unsupported_format(typed)),
        }
    }

    /// Appends a row.
    ///
    /// # Errors
    ///
    /// Fails if the format cannot represent the row.
    pub(super) fn push(&mut self, row: &impl Serialize) -> Result<(), InvalidInput> {
        match self {
            Self::Lines(bytes) => {
                serde_json::to_writer(&mut *bytes, row).map_err(|error| refused("JSON", &error))?;
                bytes.push(b'\n');
            }
            Self::Csv(writer, header) => {
                match header {
                    Some(names) if has_fields(row, names) => {}
                    Some(names) => return Err(other_fields(row, names)),
                    None => *header = Some(field_names(row).ok_or_else(|| not_a_struct(row))?),
                }
                writer.serialize(row).map_err(|error| refused("CSV", &error))?;
            }
            #[cfg(feature = "parquet")]
            Self::Table(table) => table.push(row)?,
        }
        Ok(())
    }

    /// Returns a warning about the part after its last row, if a column of the output is in no row.
    pub(super) fn absent_column(&self) -> Option<String> {
        match self {
            Self::Lines(_) | Self::Csv(..) => None,
            #[cfg(feature = "parquet")]
            Self::Table(table) => table.absent_column(),
        }
    }

    /// Returns the bytes of the part.
    ///
    /// # Errors
    ///
    /// Same as [`push`](Self::push).
    pub(super) fn finish(self) -> Result<Vec<u8>> {
        match self {
            Self::Lines(bytes) => Ok(bytes),
            Self::Csv(writer, _) => {
                Ok((*writer).into_inner().map_err(|error| error.into_error())?)
            }
            #[cfg(feature = "parquet")]
            Self::Table(table) => table.finish(),
        }
    }
}

/// Error for an output without named fields, which become the CSV header.
fn not_a_struct(row: &impl Serialize) -> InvalidInput {
    match serde_json::to_value(row) {
        Ok(row) => InvalidInput(format!(
            "the program's output is {row}, but a row of CSV must be a struct, whose fields name \
             the columns; return a struct or use another output.format"
        )),
        Err(error) => refused("CSV", &error),
    }
}

/// Error for an output whose fields differ from the CSV header: its values would be in the columns
/// of other fields.
fn other_fields(row: &impl Serialize, header: &[&str]) -> InvalidInput {
    let Some(names) = field_names(row) else { return not_a_struct(row) };
    InvalidInput(format!(
        "the program's output has the fields {}, but the first row of this part, which names the \
         columns of CSV, has {}; return the same fields for all rows, with None if a value is \
         missing, or set output.format to jsonLines",
        names.join(", "),
        header.join(", ")
    ))
}

fn refused(format: &str, error: &dyn std::fmt::Display) -> InvalidInput {
    InvalidInput(format!(
        "cannot represent the program's output as {format}: {error}; use another output.format"
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[derive(Serialize)]
    struct Item<'a> {
        name: &'a str,
        size: Option<f64>,
    }

    const ITEMS: [Item<'_>; 3] = [
        Item { name: "a", size: Some(0.1) },
        Item { name: "b, \"c\"\nd", size: None },
        Item { name: "日本", size: Some(f64::NAN) },
    ];

    fn check(format: RowFormat, num: usize, expected: &str) {
        let output = InferenceOutput { format, ..InferenceOutput::default() };
        let mut part = PartWriter::new(&output).unwrap();
        ITEMS.iter().take(num).for_each(|item| part.push(item).unwrap());
        assert_eq!(String::from_utf8(part.finish().unwrap()).unwrap(), expected);
    }

    #[test]
    fn rows_are_written_in_the_requested_format() {
        check(RowFormat::JsonLines, 0, "");
        let lines = "{\"name\":\"a\",\"size\":0.1}\n{\"name\":\"b, \\\"c\\\"\\nd\",\"size\":null}\n\
                     {\"name\":\"日本\",\"size\":null}\n";
        check(RowFormat::JsonLines, 3, lines);
        check(RowFormat::Csv, 0, "");
        check(RowFormat::Csv, 3, "name,size\na,0.1\n\"b, \"\"c\"\"\nd\",\n日本,NaN\n");
    }

    #[test]
    fn unsupported_outputs_are_refused_with_a_remedy() {
        let output = InferenceOutput { format: RowFormat::Csv, ..InferenceOutput::default() };
        let error = PartWriter::new(&output).unwrap().push(&json!({"a": {"b": 1}})).unwrap_err();
        assert!(error.to_string().contains("use another output.format"), "{error}");
        for (row, shown) in [(json!([1, "a"]), "[1,\"a\"]"), (json!(0.5), "0.5")] {
            let error = PartWriter::new(&output).unwrap().push(&row).unwrap_err().to_string();
            assert!(error.contains(&format!("output is {shown}, but a row of CSV")), "{error}");
        }
    }

    /// Fields of one struct would be written below the names of another.
    #[test]
    fn csv_rows_must_have_the_same_fields() {
        #[derive(Serialize)]
        #[serde(untagged)]
        enum Either {
            Size { name: &'static str, size: f64 },
            Swapped { size: f64, name: &'static str },
            Colour { name: &'static str, colour: u8 },
            Name { name: &'static str },
            Missing,
        }
        let output = InferenceOutput { format: RowFormat::Csv, ..InferenceOutput::default() };
        let mut part = PartWriter::new(&output).unwrap();
        let size = |size| Either::Size { name: "a", size };
        part.push(&size(1.0)).unwrap();
        for (row, fields) in [
            (Either::Swapped { size: 2.0, name: "b" }, "size, name"),
            (Either::Colour { name: "b", colour: 2 }, "name, colour"),
            (Either::Name { name: "b" }, "name"),
        ] {
            let error = part.push(&row).unwrap_err().to_string();
            let expected = format!(
                "has the fields {fields}, but the first row of this part, which names the columns \
                 of CSV, has name, size; return the same fields"
            );
            assert!(error.contains(&expected), "{error}");
        }
        let error = part.push(&Either::Missing).unwrap_err().to_string();
        assert!(error.contains("output is null, but a row of CSV"), "{error}");
        part.push(&size(2.0)).unwrap();
        let text = String::from_utf8(part.finish().unwrap()).unwrap();
        assert_eq!(text, "name,size\na,1.0\na,2.0\n");
    }
}
