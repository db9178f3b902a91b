//! Values of tables with types, as serde reads and writes them: JSON would make `null` of NaN and infinities.

use std::fmt;

use serde::de::value::{
    Error, MapAccessDeserializer, MapDeserializer, SeqDeserializer, StrDeserializer,
};
use serde::de::{Error as _, IntoDeserializer, Visitor};
use serde::ser::Impossible;
use serde::{Deserializer, Serialize, Serializer, forward_to_deserialize_any, ser};

/// A value.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Cell {
    Null,
    Boolean(bool),
    Integer(i64),
    /// An integer that may be too large for the other.
    Unsigned(u64),
    Double(f64),
    Text(String),
    List(Vec<Self>),
    Struct(Vec<(String, Self)>),
    /// Of a type that rows cannot have, with what to do; in the way only of who reads it.
    Unreadable(String),
}

impl Cell {
    /// A value of the program's.
    ///
    /// # Errors
    ///
    /// It has no form here, such as a variant with fields.
    pub(super) fn of(value: &impl Serialize) -> Result<Self, Error> {
        value.serialize(ToCell)
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => f.write_str("null"),
            Self::Boolean(it) => it.fmt(f),
            Self::Integer(it) => it.fmt(f),
            Self::Unsigned(it) => it.fmt(f),
            Self::Double(it) => it.fmt(f),
            Self::Text(it) => write!(f, "{it:?}"),
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
            Self::Null => visitor.visit_unit(),
            Self::Boolean(it) => visitor.visit_bool(it),
            Self::Integer(it) => visitor.visit_i64(it),
            Self::Unsigned(it) => visitor.visit_u64(it),
            Self::Double(it) => visitor.visit_f64(it),
            Self::Text(it) => visitor.visit_string(it),
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
            Self::Null => visitor.visit_none(),
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
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq tuple
        tuple_struct map struct identifier
    }
}

/// Makes a cell of a value.
struct ToCell;

/// A list or a struct as it comes.
#[derive(Default)]
struct Parts {
    names: Vec<String>,
    cells: Vec<Cell>,
}

impl Parts {
    fn push(&mut self, value: &(impl Serialize + ?Sized)) -> Result<(), Error> {
        self.cells.push(value.serialize(ToCell)?);
        Ok(())
    }

    fn name(&mut self, name: &(impl Serialize + ?Sized)) -> Result<(), Error> {
        let name = match name.serialize(ToCell)? {
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

impl Serializer for ToCell {
    type Ok = Cell;
    type Error = Error;
    type SerializeSeq = Parts;
    type SerializeTuple = Parts;
    type SerializeTupleStruct = Parts;
    type SerializeTupleVariant = Impossible<Cell, Error>;
    type SerializeMap = Parts;
    type SerializeStruct = Parts;
    type SerializeStructVariant = Impossible<Cell, Error>;

    fn serialize_bool(self, it: bool) -> Result<Cell, Error> {
        Ok(Cell::Boolean(it))
    }

    fn serialize_i8(self, it: i8) -> Result<Cell, Error> {
        Ok(Cell::Integer(it.into()))
    }

    fn serialize_i16(self, it: i16) -> Result<Cell, Error> {
        Ok(Cell::Integer(it.into()))
    }

    fn serialize_i32(self, it: i32) -> Result<Cell, Error> {
        Ok(Cell::Integer(it.into()))
    }

    fn serialize_i64(self, it: i64) -> Result<Cell, Error> {
        Ok(Cell::Integer(it))
    }

    fn serialize_u8(self, it: u8) -> Result<Cell, Error> {
        Ok(Cell::Integer(it.into()))
    }

    fn serialize_u16(self, it: u16) -> Result<Cell, Error> {
        Ok(Cell::Integer(it.into()))
    }

    fn serialize_u32(self, it: u32) -> Result<Cell, Error> {
        Ok(Cell::Integer(it.into()))
    }

    fn serialize_u64(self, it: u64) -> Result<Cell, Error> {
        Ok(i64::try_from(it).map_or(Cell::Unsigned(it), Cell::Integer))
    }

    fn serialize_f32(self, it: f32) -> Result<Cell, Error> {
        Ok(Cell::Double(it.into()))
    }

    fn serialize_f64(self, it: f64) -> Result<Cell, Error> {
        Ok(Cell::Double(it))
    }

    fn serialize_char(self, it: char) -> Result<Cell, Error> {
        Ok(Cell::Text(it.into()))
    }

    fn serialize_str(self, it: &str) -> Result<Cell, Error> {
        Ok(Cell::Text(it.into()))
    }

    fn serialize_bytes(self, it: &[u8]) -> Result<Cell, Error> {
        Ok(Cell::List(it.iter().map(|it| Cell::Integer((*it).into())).collect()))
    }

    fn serialize_none(self) -> Result<Cell, Error> {
        Ok(Cell::Null)
    }

    fn serialize_some<T: Serialize + ?Sized>(self, it: &T) -> Result<Cell, Error> {
        it.serialize(self)
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
        it: &T,
    ) -> Result<Cell, Error> {
        it.serialize(self)
    }

    fn serialize_newtype_variant<T: Serialize + ?Sized>(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        _: &T,
    ) -> Result<Cell, Error> {
        Err(has_fields(variant))
    }

    fn serialize_seq(self, _: Option<usize>) -> Result<Parts, Error> {
        Ok(Parts::default())
    }

    fn serialize_tuple(self, _: usize) -> Result<Parts, Error> {
        Ok(Parts::default())
    }

    fn serialize_tuple_struct(self, _: &'static str, _: usize) -> Result<Parts, Error> {
        Ok(Parts::default())
    }

    fn serialize_tuple_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        _: usize,
    ) -> Result<Self::SerializeTupleVariant, Error> {
        Err(has_fields(variant))
    }

    fn serialize_map(self, _: Option<usize>) -> Result<Parts, Error> {
        Ok(Parts::default())
    }

    fn serialize_struct(self, _: &'static str, _: usize) -> Result<Parts, Error> {
        Ok(Parts::default())
    }

    fn serialize_struct_variant(
        self,
        _: &'static str,
        _: u32,
        variant: &'static str,
        _: usize,
    ) -> Result<Self::SerializeStructVariant, Error> {
        Err(has_fields(variant))
    }
}

fn has_fields(variant: &str) -> Error {
    Error::custom(format!("the variant {variant} has fields, which a table's column cannot hold"))
}

impl ser::SerializeSeq for Parts {
    type Ok = Cell;
    type Error = Error;

    fn serialize_element<T: Serialize + ?Sized>(&mut self, it: &T) -> Result<(), Error> {
        self.push(it)
    }

    fn end(self) -> Result<Cell, Error> {
        Ok(Cell::List(self.cells))
    }
}

impl ser::SerializeTuple for Parts {
    type Ok = Cell;
    type Error = Error;

    fn serialize_element<T: Serialize + ?Sized>(&mut self, it: &T) -> Result<(), Error> {
        self.push(it)
    }

    fn end(self) -> Result<Cell, Error> {
        Ok(Cell::List(self.cells))
    }
}

impl ser::SerializeTupleStruct for Parts {
    type Ok = Cell;
    type Error = Error;

    fn serialize_field<T: Serialize + ?Sized>(&mut self, it: &T) -> Result<(), Error> {
        self.push(it)
    }

    fn end(self) -> Result<Cell, Error> {
        Ok(Cell::List(self.cells))
    }
}

impl ser::SerializeMap for Parts {
    type Ok = Cell;
    type Error = Error;

    fn serialize_key<T: Serialize + ?Sized>(&mut self, name: &T) -> Result<(), Error> {
        self.name(name)
    }

    fn serialize_value<T: Serialize + ?Sized>(&mut self, it: &T) -> Result<(), Error> {
        self.push(it)
    }

    fn end(self) -> Result<Cell, Error> {
        Ok(self.fields())
    }
}

impl ser::SerializeStruct for Parts {
    type Ok = Cell;
    type Error = Error;

    fn serialize_field<T: Serialize + ?Sized>(
        &mut self,
        name: &'static str,
        it: &T,
    ) -> Result<(), Error> {
        self.names.push(name.into());
        self.push(it)
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
    fn what_is_written_is_read_back() {
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
    fn what_cannot_be_read_is_in_the_way_of_who_reads_it_alone() {
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
