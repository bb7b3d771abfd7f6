CREATE TABLE customer (id INTEGER PRIMARY KEY, name TEXT NOT NULL, city TEXT);
CREATE TABLE product (id INTEGER PRIMARY KEY, name TEXT NOT NULL, price REAL NOT NULL);
CREATE TABLE purchase (id INTEGER PRIMARY KEY, customer INTEGER NOT NULL REFERENCES customer, product INTEGER NOT NULL REFERENCES product, pieces INTEGER NOT NULL);
INSERT INTO customer VALUES (1, 'Ada', 'Lyon'), (2, 'Ben', 'Oslo'), (3, 'Cem', 'Oslo'), (4, 'Dora', 'Riga'), (5, 'Eva', NULL);
INSERT INTO product VALUES (1, 'lamp', 40.0), (2, 'chair', 75.5), (3, 'pen', 1.2), (4, 'desk', 210.0);
INSERT INTO purchase VALUES (1, 1, 1, 2), (2, 1, 3, 10), (3, 2, 2, 1), (4, 3, 3, 5), (5, 3, 4, 1), (6, 4, 1, 1), (7, 2, 3, 3);
