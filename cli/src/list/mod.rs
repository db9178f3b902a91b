//! Lists of objects: filters, order, formats, and updates with `--watch`. Local runs and clusters
//! fill the same [`List`].
//!
//! 1. [`ListArgs`], [`OrderArgs`]: flags.
//! 2. [`selector`]: filter by labels.
//! 3. [`sort`]: order by a column or a field.
//! 4. [`watch`]: rows that change.
//! 5. [`experiments`], [`trials`], [`checkpoints`], [`jobs`]: rows of each kind.

pub(crate) mod checkpoints;
pub(crate) mod experiments;
pub(crate) mod jobs;
mod selector;
mod sort;
pub(crate) mod trials;
mod watch;

use std::collections::BTreeMap;
use std::future::Future;

use clap::Args;
use clap::builder::PossibleValuesParser;
use serde_json::{Value, json};
use stoker_api::time::Timestamp;

use self::selector::Selector;
use crate::cluster::text;
use crate::failure::Failure;
use crate::print::{self, Format};

/// Phases for `--phase`. `Invalid` and `Stopped` are shown for objects without a runner.
const PHASES: [&str; 8] =
    ["Pending", "Running", "Paused", "Completed", "Failed", "Cancelled", "Invalid", "Stopped"];

/// Flags for order, number and format of the rows.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct OrderArgs {
    /// Sort by a column, such as AGE, or by a field of the JSON object, such as .status.phase.
    /// `-FIELD` sorts descending. For trials also hparams.NAME and metrics.NAME. Objects without
    /// the field are last
    #[arg(long, value_name = "FIELD", allow_hyphen_values = true, help_heading = "List")]
    sort_by: Option<String>,
    /// Reverse the order
    #[arg(long, help_heading = "List")]
    reverse: bool,
    /// Print only the first N rows. Without --sort-by, trials and checkpoints are sorted by the
    /// searched metric, best first
    #[arg(long, value_name = "N", help_heading = "List")]
    top: Option<usize>,
    /// After the list, print new and changed rows until interrupted. With `--output json`, prints
    /// one value per line
    #[arg(long, short, help_heading = "List")]
    watch: bool,
    /// Output format
    #[arg(
        long, short, value_parser = Format::of_lists(), default_value = "text",
        help_heading = "List"
    )]
    output: Format,
}

/// Flags of lists of objects with phases and labels.
#[derive(Clone, Debug, Default, Args)]
pub(crate) struct ListArgs {
    #[command(flatten)]
    order: OrderArgs,
    /// List only objects in these phases, separated by commas
    #[arg(
        long, value_name = "PHASE", value_delimiter = ',', ignore_case = true,
        value_parser = PossibleValuesParser::new(PHASES), help_heading = "List"
    )]
    phase: Vec<String>,
    /// List only objects with these labels, such as team=a,tier!=test or 'team in (a, b)'
    #[arg(
        long, short = 'l', value_name = "LABELS", value_parser = parse_selector,
        help_heading = "List"
    )]
    selector: Option<Selector>,
}

fn parse_selector(text: &str) -> Result<Selector, String> {
    text.parse()
}

impl ListArgs {
    /// Returns the label selector for the API server.
    pub(crate) fn selector(&self) -> Option<String> {
        self.selector.as_ref().map(ToString::to_string)
    }
}

/// Rows with their columns.
#[derive(Debug)]
pub(crate) struct List {
    pub(crate) columns: Vec<Column>,
    pub(crate) rows: Vec<Row>,
    /// Message if there are no rows.
    pub(crate) empty: String,
    /// Word for a row in messages.
    pub(crate) noun: &'static str,
}

/// A column of the text formats.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Column {
    header: String,
    shown_in: ShownIn,
}

/// Formats that show a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ShownIn {
    All,
    Wide,
    Default,
}

impl Column {
    pub(crate) fn new(header: &str) -> Self {
        Self { header: header.to_uppercase(), shown_in: ShownIn::All }
    }

    /// A column of `--output wide` only.
    pub(crate) fn wide(header: &str) -> Self {
        Self { shown_in: ShownIn::Wide, ..Self::new(header) }
    }

    /// Hides the column in `--output wide`.
    pub(crate) fn narrow(self) -> Self {
        Self { shown_in: ShownIn::Default, ..self }
    }

    fn is_shown(&self, format: Format) -> bool {
        match self.shown_in {
            ShownIn::All => true,
            ShownIn::Wide => format == Format::Wide,
            ShownIn::Default => format != Format::Wide,
        }
    }
}

/// One listed object.
#[derive(Debug, Default)]
pub(crate) struct Row {
    /// Name for `--output name`.
    pub(crate) name: String,
    pub(crate) phase: String,
    pub(crate) labels: BTreeMap<String, String>,
    /// One cell per column.
    pub(crate) cells: Vec<Cell>,
    /// Value for JSON and YAML.
    pub(crate) value: Value,
    /// Searched metric, smaller is better.
    pub(crate) rank: Option<f64>,
}

/// Text of a cell and the key for sorting by its column.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct Cell {
    text: String,
    key: Option<Key>,
}

/// Sort key. Numbers come before texts.
#[derive(Clone, Debug, PartialEq)]
enum Key {
    Number(f64),
    Text(String),
}

impl Cell {
    /// A text; a dash if it is empty.
    pub(crate) fn text(text: impl Into<String>) -> Self {
        let text = text.into();
        match text.is_empty() {
            true => Self { text: "-".to_owned(), key: None },
            false => Self { key: Some(Key::Text(text.clone())), text },
        }
    }

    /// A number with this text.
    pub(crate) fn number(number: f64, text: impl Into<String>) -> Self {
        Self { text: text.into(), key: Some(Key::Number(number)) }
    }

    /// A count.
    pub(crate) fn count(count: impl Into<u64>) -> Self {
        let count = count.into();
        Self::number(count as f64, count.to_string())
    }

    /// The time since `created`.
    pub(crate) fn age(created: Option<Timestamp>, now: Timestamp) -> Self {
        let seconds = created.map(|created| now.seconds_since(created) as f64);
        Self { text: text::age(created, now), key: seconds.map(Key::Number) }
    }
}

impl List {
    /// Applies the filters, the order and `--top`.
    fn select(&mut self, args: &ListArgs) -> Result<(), Failure> {
        let is_selected = |row: &Row| {
            let has_phase = |phase: &String| phase.eq_ignore_ascii_case(&row.phase);
            (args.phase.is_empty() || args.phase.iter().any(has_phase))
                && args.selector.as_ref().is_none_or(|selector| selector.matches(&row.labels))
        };
        let num_listed = self.rows.len();
        self.rows.retain(is_selected);
        let filters =
            [("--phase", !args.phase.is_empty()), ("--selector", args.selector.is_some())];
        let given: Vec<&str> =
            filters.iter().filter(|(_, is_given)| *is_given).map(|(name, _)| *name).collect();
        self.note_hidden(num_listed, &given.join(" and "));
        self.arrange(&args.order)
    }

    /// Applies the order and `--top`.
    fn arrange(&mut self, args: &OrderArgs) -> Result<(), Failure> {
        match &args.sort_by {
            Some(field) => sort::sort(&self.columns, &mut self.rows, field, args.reverse)?,
            None => {
                if args.top.is_some() {
                    sort::by_rank(&mut self.rows);
                }
                if args.reverse {
                    self.rows.reverse();
                }
            }
        }
        let num_listed = self.rows.len();
        self.rows.truncate(args.top.unwrap_or(usize::MAX));
        self.note_hidden(num_listed, "--top");
        Ok(())
    }

    /// Explains an empty list if these flags hide all rows.
    fn note_hidden(&mut self, num_listed: usize, flags: &str) {
        if self.rows.is_empty() && num_listed > 0 {
            let verb = if num_listed == 1 { "is" } else { "are" };
            self.empty =
                format!("no {} is shown: {num_listed} {verb} hidden by {flags}", self.noun);
        }
    }

    fn print(self, format: Format) -> Result<(), Failure> {
        match format {
            Format::Json => print::out(json!(self.values())),
            Format::Yaml => print::out(print::yaml(&json!(self.values()))?),
            Format::Name => self.rows.iter().for_each(|row| print::out(&row.name)),
            _ if self.rows.is_empty() => print::err(self.empty),
            _ => {
                let header = self.header(format);
                let header: Vec<&str> = header.iter().map(String::as_str).collect();
                let rows: Vec<Vec<String>> =
                    self.rows.iter().map(|row| self.texts(row, format)).collect();
                print::out(print::table(&header, &rows));
            }
        }
        Ok(())
    }

    fn values(&self) -> Vec<&Value> {
        self.rows.iter().map(|row| &row.value).collect()
    }

    fn header(&self, format: Format) -> Vec<String> {
        let shown = self.columns.iter().filter(|column| column.is_shown(format));
        shown.map(|column| column.header.clone()).collect()
    }

    fn texts(&self, row: &Row, format: Format) -> Vec<String> {
        let cells = self.columns.iter().zip(&row.cells);
        let shown = cells.filter(|(column, _)| column.is_shown(format));
        shown.map(|(_, cell)| cell.text.clone()).collect()
    }
}

/// Prints the list that `read` returns. With `--watch`, reads it again and again, and prints the
/// rows that have changed.
pub(crate) async fn list<F: Future<Output = Result<List, Failure>>>(
    args: &ListArgs,
    read: impl Fn() -> F,
) -> Result<(), Failure> {
    let selected = async || {
        let mut list = read().await?;
        list.select(args)?;
        Ok(list)
    };
    print_or_watch(&args.order, selected).await
}

/// Like [`list`], for objects without phases and labels.
pub(crate) async fn list_in_order<F: Future<Output = Result<List, Failure>>>(
    args: &OrderArgs,
    read: impl Fn() -> F,
) -> Result<(), Failure> {
    let arranged = async || {
        let mut list = read().await?;
        list.arrange(args)?;
        Ok(list)
    };
    print_or_watch(args, arranged).await
}

async fn print_or_watch(
    args: &OrderArgs,
    read: impl AsyncFn() -> Result<List, Failure>,
) -> Result<(), Failure> {
    match args.watch {
        true => watch::watch(args.output, read).await,
        false => read().await?.print(args.output),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns a list of trials: name, phase, team, metric and width.
    fn trials(rows: &[(&str, &str, &str, Option<f64>, u32)]) -> List {
        let columns = vec![Column::new("trial"), Column::new("loss"), Column::wide("width")];
        let row = |(name, phase, team, metric, width): &(&str, &str, &str, Option<f64>, u32)| Row {
            name: format!("trial.stoker.dev/{name}"),
            phase: (*phase).to_owned(),
            labels: BTreeMap::from([("team".to_owned(), (*team).to_owned())]),
            cells: vec![
                Cell::text(*name),
                metric.map_or_else(Cell::default, |value| Cell::number(value, value.to_string())),
                Cell::count(*width),
            ],
            value: json!({"status": {"metrics": {"accuracy": width}}, "name": name}),
            rank: *metric,
        };
        let rows = rows.iter().map(row).collect();
        List { columns, rows, empty: "nothing".to_owned(), noun: "trial" }
    }

    fn check(flags: &str, expected: Result<&[&str], &str>) {
        let (list, selected) = select(flags);
        let texts =
            || -> Vec<&str> { list.rows.iter().map(|row| row.cells[0].text.as_str()).collect() };
        match (selected.map(|()| texts()), expected) {
            (Ok(actual), Ok(expected)) => assert_eq!(actual, expected, "{flags}"),
            (Err(error), Err(part)) => assert!(error.to_string().contains(part), "{error}"),
            (actual, expected) => panic!("{flags}: {actual:?} is not {expected:?}"),
        }
    }

    /// Applies the flags to a list of four trials.
    fn select(flags: &str) -> (List, Result<(), Failure>) {
        #[derive(Debug, clap::Parser)]
        struct Cli {
            #[command(flatten)]
            args: ListArgs,
        }
        let words = std::iter::once("x").chain(flags.split_whitespace());
        let cli = <Cli as clap::Parser>::try_parse_from(words).unwrap();
        let mut list = trials(&[
            ("m-0", "Completed", "a", Some(0.5), 8),
            ("m-1", "Running", "b", None, 16),
            ("m-2", "Failed", "a", Some(0.25), 4),
            ("m-10", "Completed", "b", Some(0.75), 2),
        ]);
        let selected = list.select(&cli.args);
        (list, selected)
    }

    #[test]
    fn rows_are_filtered_and_sorted() {
        check("", Ok(&["m-0", "m-1", "m-2", "m-10"]));
        check("--reverse", Ok(&["m-10", "m-2", "m-1", "m-0"]));
        check("--phase completed", Ok(&["m-0", "m-10"]));
        check("--phase Running,Failed", Ok(&["m-1", "m-2"]));
        check("-l team=a", Ok(&["m-0", "m-2"]));
        check("--phase Completed -l team!=a", Ok(&["m-10"]));
        check("--sort-by width", Ok(&["m-10", "m-2", "m-0", "m-1"]));
        check("--sort-by -WIDTH", Ok(&["m-1", "m-0", "m-2", "m-10"]));
        check("--sort-by -width --reverse", Ok(&["m-10", "m-2", "m-0", "m-1"]));
        check("--sort-by metrics.accuracy", Ok(&["m-10", "m-2", "m-0", "m-1"]));
        check("--sort-by {.status.metrics.accuracy}", Ok(&["m-10", "m-2", "m-0", "m-1"]));
        check("--sort-by .name", Ok(&["m-0", "m-1", "m-10", "m-2"]));
        check("--sort-by color", Err("--sort-by color: "));
    }

    #[test]
    fn missing_values_are_last_in_both_directions() {
        check("--sort-by loss", Ok(&["m-2", "m-0", "m-10", "m-1"]));
        check("--sort-by -loss", Ok(&["m-10", "m-0", "m-2", "m-1"]));
    }

    #[test]
    fn top_rows_are_the_best_or_the_first() {
        check("--top 2", Ok(&["m-2", "m-0"]));
        check("--top 2 --phase Completed", Ok(&["m-0", "m-10"]));
        check("--top 1 --sort-by -width", Ok(&["m-1"]));
        check("--top 0", Ok(&[]));
    }

    #[test]
    fn empty_list_names_the_flags_that_hide_rows() {
        for (flags, expected) in [
            ("--phase paused --top 2", "no trial is shown: 4 are hidden by --phase"),
            ("-l team=c", "no trial is shown: 4 are hidden by --selector"),
            (
                "--phase Paused -l team=a",
                "no trial is shown: 4 are hidden by --phase and --selector",
            ),
            ("--phase Failed --top 0", "no trial is shown: 1 is hidden by --top"),
        ] {
            assert_eq!(select(flags).0.empty, expected, "{flags}");
        }
    }

    #[test]
    fn wide_columns_are_hidden_in_text() {
        let list = trials(&[("m-0", "Completed", "a", Some(0.5), 8)]);
        assert_eq!(list.header(Format::Text), ["TRIAL", "LOSS"]);
        assert_eq!(list.texts(&list.rows[0], Format::Text), ["m-0", "0.5"]);
        assert_eq!(list.texts(&list.rows[0], Format::Wide), ["m-0", "0.5", "8"]);
    }
}
