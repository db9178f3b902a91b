//! Typed table values with serde support. JSON cannot be used in between: it turns NaN and
//! infinities into `null`.

use std::fmt;

use serde::de::value::{
    Error, MapAccessDeserializer, MapDeserializer, SeqDeserializer, StrDeserializer,
};
use serde::de::{Error as _, IntoDeserializer, Visitor};
use serde::ser::Impossible;
use serde::{Deserializer, Serialize, Serializer, forward_to_deserialize_any, ser};

/// A typed value.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Cell {
    Null,
    Boolean(bool),
    Integer(i64),
    /// An integer that may exceed `i64`.
    Unsigned(u64),
    Double(f64),
    Text(String),
    List(Vec<Self>),
    Struct(Vec<(String, Self)>),
    /// A field that the program left out of this row, with `skip_serializing_if`.
    Skipped,
    /// A value of an unsupported type, with an error message for rows that read it.
    Unreadable(String),
}

impl Cell {
    /// Converts a value of the program.
    ///
    /// # Errors
    ///
    /// Fails for values that tables do not support, such as enum variants with fields.
    pub(super) fn of(value: &impl Serialize) -> Result<Self, Error> {
        value.serialize(CellSerializer)
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null | Self::Skipped => f.write_str("null"),
            Self::Boolean(value) => value.fmt(f),
            Self::Integer(value) => value.fmt(f),
            Self::Unsigned(value) => value.fmt(f),
            Self::Double(value) => value.fmt(f),
            Self::Text(value) => write!(f, "{value:?}"),
            Self::List(_) => f.write_str("a list"),
            Self::Struct(_) => f.write_str("a struct"),
            Self::Unreadable(why) => f.write_str(why),
        }
    }
}

impl IntoDeserializer<'_, Error> for Cell {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl<'de> Deserializer<'de> for Cell {
    type Error = Error;

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self {
            Self::Null | Self::Skipped => visitor.visit_unit(),
            Self::Boolean(value) => visitor.visit_bool(value),
            Self::Integer(value) => visitor.visit_i64(value),
            Self::Unsigned(value) => visitor.visit_u64(value),
            Self::Double(value) => visitor.visit_f64(value),
            Self::Text(value) => visitor.visit_string(value),
            Self::List(items) => {
                let mut items = SeqDeserializer::new(items.into_iter());
                let list = visitor.visit_seq(&mut items)?;
                items.end().map(|()| list)
            }
            Self::Struct(fields) => {
                let mut fields = MapDeserializer::new(fields.into_iter());
                let value = visitor.visit_map(&mut fields)?;
                fields.end().map(|()| value)
            }
            Self::Unreadable(why) => Err(Error::custom(why)),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        match self {
            Self::Null | Self::Skipped => visitor.visit_none(),
            some => visitor.visit_some(some),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Result<V::Value, Error> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Result<V::Value, Error> {
        match self {
            Self::Text(name) => visitor.visit_enum(StrDeserializer::new(&name)),
            Self::Struct(fields) => {
                let fields = MapDeserializer::new(fields.into_iter());
                visitor.visit_enum(MapAccessDeserializer::new(fields))
            }
            other => other.deserialize_any(visitor),
        }
    }

    fn deserialize_ignored_any<V: Visitor<'de>>(self, visitor: V) -> Result<V::Value, Error> {
        visitor.visit_unit()
    }

    forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit
        unit_struct seq tuple tuple_struct map struct identifier
    }
}

/// Serializer that creates a cell.
struct CellSerializer;

/// A list or struct being serialized.
#[derive(Default)]
struct CompoundBuilder {
    names: Vec<String>,
    cells: Vec<Cell>,
}

impl CompoundBuilder {
    fn push(&mut self, value: &(impl Serialize + ?Sized)) -> Result<(), Error> {
        self.cells.push(value.serialize(CellSerializer)?);
        Ok(())
    }

    fn name(&mut self, name: &(impl Serialize + ?Sized)) -> Result<(), Error> {
        let name = match name.serialize(CellSerializer)? {
            Cell::Text(name) => name,
            other => other.to_string(),
        };
        self.names.push(name);
        Ok(())
    }

    fn fields(self) -> Cell {
        Cell::Struct(self.names.into_iter().zip(self.cells).collect())
    }
}

impl Serializer for CellSerializer {
    type Ok = Cell;
    type Error = Error;
    type SerializeSeq = CompoundBuilder;
    type SerializeTuple = CompoundBuilder;
    type SerializeTupleStruct = CompoundBuilder;
    type SerializeTupleVariant = Impossible<Cell, Error>;
    type SerializeMap = CompoundBuilder;
    type SerializeStruct = CompoundBuilder;
    type SerializeStructVariant = Impossible<Cell, Error>;

    fn serialize_bool(self, value: bool) -> Result<Cell, Error> {
        Ok(Cell::Boolean(value))
    }

    fn serialize_i8(self, value: i8) -> Result<Cell, Error> {
        Ok(Cell::Integer(value.into()))
    }

    fn serialize_i16(self, value: i16) -> Result<Cell, Error> {
        Ok(Cell::Integer(value.into()))
    }

    fn serialize_i32(self, value: i32) -> Result<Cell, Error> {
        Ok(Cell::Integer(value.into()))
    }

    fn serialize_i64(self, value: i64) -> Result<Cell, Error> {
        Ok(Cell::Integer(value))
    }

    fn serialize_u8(self, value: u8) -> Result<Cell, Error> {
        Ok(Cell::Integer(value.into()))
    }

    fn serialize_u16(self, value: u16) -> Result<Cell, Error> {
        Ok(Cell::Integer(value.into()))
    }

    fn serialize_u32(self, value: u32) -> Result<Cell, Error> {
        Ok(Cell::Integer(value.into()))
    }

    fn serialize_u64(self, value: u64) -> Result<Cell, Error> {
        Ok(i64::try_from(value).map_or(Cell::Unsigned(value), Cell::Integer))
    }

    fn serialize_f32(self, value: f32) -> Result<Cell, Error> {
        Ok(Cell::Double(value.into()))
    }

    fn serialize_f64(self, value: f64) -> Result<Cell, Error> {
        Ok(Cell::Double(value))
    }

    fn serialize_char(self, value: char) -> Result<Cell, Error> {
        Ok(Cell::Text(value.into()))
    }

    fn serialize_str(self, value: &str) -> Result<Cell, Error> {
        Ok(Cell::Text(value.into()))
    }

    fn serialize_bytes(self, bytes: &[u8]) -> Result<Cell, Error> {
        Ok(Cell::List(bytes.iter().map(|byte| Cell::Integer((*byte).into())).collect()))
    }

    fn serialize_none(self) -> Result<Cell, Error> {
        Ok(Cell::Null)
    }

    fn serialize_some<T: Serialize + ?Sized>(self, value: &T) -> Result<Cell, Error> {
        value.serialize(self)
    }

    fn serialize_unit(self) -> Result<Cell, Error> {
        Ok(Cell::Null)
    }

    fn serialize_unit_struct(self, _: &'static str) -> Result<Cell, Error> {
        Ok(Cell::Null)
    }

    fn serialize_unit_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
    ) -> Result<Cell, Error> {
        Ok(Cell::Text(variant.into()))
    }

    fn serialize_newtype_struct<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        value: &T,
    ) -> Result<Cell, Error> {
        value.serialize(self)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        _: &T,
    ) -> Result<Cell, Error> {
        Err(variant_with_fields(variant))
    }

    fn serialize_seq(self, _: Option<usize>) -> Result<CompoundBuilder, Error> {
        Ok(CompoundBuilder::default())
    }

    fn serialize_tuple(self, _: usize) -> Result<CompoundBuilder, Error> {
        Ok(CompoundBuilder::default())
    }

    fn serialize_tuple_struct(self, _: &'static str, _: usize) -> Result<CompoundBuilder, Error> {
        Ok(CompoundBuilder::default())
    }

    fn serialize_tuple_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        _: usize,
    ) -> Result<Self::SerializeTupleVariant, Error> {
        Err(variant_with_fields(variant))
    }

    fn serialize_map(self, _: Option<usize>) -> Result<CompoundBuilder, Error> {
        Ok(CompoundBuilder::default())
    }

    fn serialize_struct(self, _: &'static str, _: usize) -> Result<CompoundBuilder, Error> {
        Ok(CompoundBuilder::default())
    }

    fn serialize_struct_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        _: usize,
    ) -> Result<Self::SerializeStructVariant, Error> {
        Err(variant_with_fields(variant))
    }
}

fn variant_with_fields(variant: &str) -> Error {
    Error::custom(format!("variant {variant} has fields, which a table column does not support"))
}

impl ser::SerializeSeq for CompoundBuilder {
    type Ok = Cell;
    type Error = Error;

    fn serialize_element<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Error> {
        self.push(value)
    }

    fn end(self) -> Result<Cell, Error> {
        Ok(Cell::List(self.cells))
    }
}

impl ser::SerializeTuple for CompoundBuilder {
    type Ok = Cell;
    type Error = Error;

    fn serialize_element<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Error> {
        self.push(value)
    }

    fn end(self) -> Result<Cell, Error> {
        Ok(Cell::List(self.cells))
    }
}

impl ser::SerializeTupleStruct for CompoundBuilder {
    type Ok = Cell;
    type Error = Error;

    fn serialize_field<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Error> {
        self.push(value)
    }

    fn end(self) -> Result<Cell, Error> {
        Ok(Cell::List(self.cells))
    }
}

impl ser::SerializeMap for CompoundBuilder {
    type Ok = Cell;
    type Error = Error;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, name: &T) -> Result<(), Error> {
        self.name(name)
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, value: &T) -> Result<(), Error> {
        self.push(value)
    }

    fn end(self) -> Result<Cell, Error> {
        Ok(self.fields())
    }
}

impl ser::SerializeStruct for CompoundBuilder {
    type Ok = Cell;
    type Error = Error;

    fn serialize_field<T: Serialize + ?Sized>(
        &mut self,
        name: &'static str,
        value: &T,
    ) -> Result<(), Error> {
        self.names.push(name.into());
        self.push(value)
    }

    fn skip_field(&mut self, name: &'static str) -> Result<(), Error> {
        self.names.push(name.into());
        self.cells.push(Cell::Skipped);
        Ok(())
    }

    fn end(self) -> Result<Cell, Error> {
        Ok(self.fields())
    }
}

#[cfg(test)]
mod tests {
    use serde::Deserialize;

    use super::*;

    #[derive(Debug, Deserialize, PartialEq, Serialize)]
    enum Kind {
        Small,
    }

    #[derive(Debug, Deserialize, PartialEq, Serialize)]
    struct Inner(f32);

    #[derive(Debug, Deserialize, PartialEq, Serialize)]
    struct Item {
        flag: bool,
        count: Option<i8>,
        large: u64,
        size: Option<f64>,
        name: String,
        kind: Kind,
        inner: Inner,
        list: (i32, i32),
        unit: (),
    }

    #[test]
    fn values_round_trip() {
        for size in [None, Some(f64::INFINITY), Some(f64::NEG_INFINITY), Some(0.1)] {
            let item = Item {
                flag: true,
                count: Some(-3),
                large: u64::MAX,
                size,
                name: "ä".into(),
                kind: Kind::Small,
                inner: Inner(0.5),
                list: (1, 2),
                unit: (),
            };
            assert_eq!(Item::deserialize(Cell::of(&item).unwrap()).unwrap(), item);
        }
        let size = Option::<f64>::deserialize(Cell::of(&f64::NAN).unwrap()).unwrap();
        assert!(size.is_some_and(f64::is_nan));
    }

    #[test]
    fn unreadable_fields_fail_only_when_read() {
        #[derive(Debug, Deserialize)]
        struct Name {
            name: String,
        }
        let fields = |name: Cell| {
            let time = Cell::Unreadable("a time cannot be read".into());
            Cell::Struct(vec![("time".into(), time), ("name".into(), name)])
        };
        assert_eq!(Name::deserialize(fields(Cell::Text("a".into()))).unwrap().name, "a");
        let check = |error: Error, expected: &str| assert_eq!(error.to_string(), expected);
        let wrong = fields(Cell::Unreadable("no name".into()));
        check(Name::deserialize(wrong).unwrap_err(), "no name");
        let wrong = Name::deserialize(fields(Cell::Double(0.5))).unwrap_err();
        check(wrong, "invalid type: floating point `0.5`, expected a string");
        let list = Cell::List(vec![Cell::Integer(1); 3]);
        check(
            <(i32, i32)>::deserialize(list).unwrap_err(),
            "invalid length 3, expected 2 elements in sequence",
        );
    }
}
